// Text of bytes that come one by one and need not be text.
#pragma once

#include <cstdint>
#include <string>

namespace qshard {

// Lets whole characters of valid UTF-8 through as soon as they are complete. A byte that belongs to
// none, and a control character other than newline and tab (it could change the terminal), becomes
// U+FFFD.
class Utf8Stream {
 public:
  std::string push(uint8_t byte);  // what can be shown now; often empty
  std::string finish();            // what is left of an incomplete character

 private:
  std::string pending_;  // the beginning of a character
};

}  // namespace qshard
