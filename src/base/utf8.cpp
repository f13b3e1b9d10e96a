#include "base/utf8.h"

#include <utility>

namespace qshard {
namespace {

constexpr const char* kReplacement = "\xEF\xBF\xBD";  // U+FFFD

bool is_continuation(uint8_t byte) { return (byte & 0xC0) == 0x80; }

// Bytes of the character that `lead` begins; 0: it begins none.
size_t length_of(uint8_t lead) {
  if (lead < 0x80) return 1;
  if (lead >= 0xC2 && lead <= 0xDF) return 2;
  if (lead >= 0xE0 && lead <= 0xEF) return 3;
  if (lead >= 0xF0 && lead <= 0xF4) return 4;
  return 0;
}

// No second byte of a longer form than needed, of a surrogate, or of a code point past U+10FFFF.
bool is_second(uint8_t lead, uint8_t byte) {
  if (lead == 0xE0) return byte >= 0xA0 && is_continuation(byte);
  if (lead == 0xED) return byte <= 0x9F && is_continuation(byte);
  if (lead == 0xF0) return byte >= 0x90 && is_continuation(byte);
  if (lead == 0xF4) return byte <= 0x8F && is_continuation(byte);
  return is_continuation(byte);
}

bool is_control(const std::string& character) {
  const auto first = static_cast<uint8_t>(character[0]);
  if (first < 0x20 || first == 0x7F) return first != '\n' && first != '\t';
  return first == 0xC2 && static_cast<uint8_t>(character[1]) < 0xA0;  // U+0080 … U+009F
}

}  // namespace

std::string Utf8Stream::push(uint8_t byte) {
  std::string shown;
  if (!pending_.empty()) {
    const auto lead = static_cast<uint8_t>(pending_[0]);
    const bool goes_on = pending_.size() == 1 ? is_second(lead, byte) : is_continuation(byte);
    if (!goes_on) shown = finish();
  }
  pending_ += static_cast<char>(byte);
  const size_t length = length_of(static_cast<uint8_t>(pending_[0]));
  if (length == 0) return shown + finish();
  if (pending_.size() < length) return shown;
  return shown + (is_control(pending_) ? finish() : std::exchange(pending_, ""));
}

std::string Utf8Stream::finish() { return std::exchange(pending_, "").empty() ? "" : kReplacement; }

}  // namespace qshard
