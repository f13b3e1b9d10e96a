#include "cli/bench_print.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace qshard {
namespace {

std::string cell(const Document& value) {
  if (value.is_null()) return "-";
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_number_float()) return value.dump();
  const double x = value.get<double>();
  if (x == 0 || (std::abs(x) >= 1e-3 && std::abs(x) < 1e7)) {
    const int whole = std::abs(x) >= 1 ? static_cast<int>(std::log10(std::abs(x))) + 1 : 1;
    return fmt::format("{:.{}f}", x, std::max(0, 4 - whole));
  }
  return fmt::format("{:.3e}", x);
}

// Characters, of which UTF-8 begins each with one byte.
size_t width(const std::string& text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

std::string padded(const std::string& text, size_t to, bool left) {
  const std::string gap(to - std::min(to, width(text)), ' ');
  return left ? text + gap : gap + text;
}

}  // namespace

std::string bench_table(const Document& document) {
  std::string text;
  for (const auto& [name, value] : document.items()) {
    if (name == "rows" || value.is_null()) continue;
    if (value.is_object())
      text += bench_table(value);
    else
      text += fmt::format("{:<22} {}\n", name, cell(value));
  }
  if (!document.contains("rows") || document["rows"].empty()) return text;
  const Document& rows = document["rows"];
  text += '\n';
  std::vector<std::string> lines(rows.size() + 1);
  for (const auto& [name, first] : rows[0].items()) {
    const bool left = first.is_string();
    size_t widest = width(name);
    for (const Document& row : rows) widest = std::max(widest, width(cell(row[name])));
    lines[0] += padded(name, widest, left) + "  ";
    for (size_t i = 0; i < rows.size(); ++i)
      lines[i + 1] += padded(cell(rows[i][name]), widest, left) + "  ";
  }
  for (const std::string& line : lines)
    text += line.substr(0, line.find_last_not_of(' ') + 1) + '\n';
  return text;
}

}  // namespace qshard
