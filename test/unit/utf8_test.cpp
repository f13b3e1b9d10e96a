#include "base/utf8.h"

#include <gtest/gtest.h>

namespace qshard {
namespace {

const std::string kBad = "\xEF\xBF\xBD";

std::string shown(const std::string& bytes) {
  Utf8Stream stream;
  std::string text;
  for (char c : bytes) text += stream.push(static_cast<uint8_t>(c));
  return text + stream.finish();
}

TEST(Utf8, ValidTextPassesUnchanged) {
  for (const std::string text :
       {"", "int main() {\n\treturn 0;\n}", "é", "→", "😀", "aé→😀b", "\xED\x9F\xBF", "\xEE\x80\x80",
        "\xF0\x90\x80\x80", "\xF4\x8F\xBF\xBF", "\xC2\xA0"})
    EXPECT_EQ(shown(text), text);
}

TEST(Utf8, CharactersAppearWhenTheyAreComplete) {
  Utf8Stream stream;
  EXPECT_EQ(stream.push('a'), "a");
  EXPECT_EQ(stream.push(0xE2), "");
  EXPECT_EQ(stream.push(0x86), "");
  EXPECT_EQ(stream.push(0x92), "→");
  EXPECT_EQ(stream.finish(), "");
}

TEST(Utf8, InvalidBytesAreReplaced) {
  EXPECT_EQ(shown("\x80"), kBad);                                // continues nothing
  EXPECT_EQ(shown("\xFF"), kBad);                                // never valid
  EXPECT_EQ(shown("\xC0\x80"), kBad + kBad);                     // longer form of NUL
  EXPECT_EQ(shown("\xE0\x80\x80"), kBad + kBad + kBad);          // longer form
  EXPECT_EQ(shown("\xED\xA0\x80"), kBad + kBad + kBad);          // a surrogate
  EXPECT_EQ(shown("\xF4\x90\x80\x80").size(), 4 * kBad.size());  // past U+10FFFF
  EXPECT_EQ(shown("\xE2\x86"), kBad);                            // cut off
  EXPECT_EQ(shown("\xE2\x86x"), kBad + "x");
  EXPECT_EQ(shown("\xE2\xE2\x86\x92"), kBad + "→");
}

TEST(Utf8, ControlCharactersAreReplaced) {
  EXPECT_EQ(shown("\x1b[2J"), kBad + "[2J");
  EXPECT_EQ(shown(std::string("a\0b\rc\x7f", 6)), "a" + kBad + "b" + kBad + "c" + kBad);
  EXPECT_EQ(shown("\xC2\x9B"), kBad);
}

}  // namespace
}  // namespace qshard
