#include "cli/page.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <string_view>

#include "base/config.h"

namespace qshard {
namespace {

constexpr int kColumns = 80;

// Columns that a terminal needs: one a code point.
int width(const std::string& text) {
  return static_cast<int>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xC0) != 0x80;
  }));
}

std::string padded(const std::string& text, int columns, bool right) {
  const std::string space(static_cast<size_t>(std::max(0, columns - width(text))), ' ');
  return right ? space + text : text + space;
}

}  // namespace

void Page::title(const std::string& text) {
  out_ += style_.markdown ? "# " + text + "\n" : paint("1", text) + "\n";
}

void Page::section(const std::string& text) {
  out_ += style_.markdown ? "\n## " + text + "\n\n" : "\n" + paint("1;36", text) + "\n";
}

void Page::line(const std::string& text) {
  if (style_.markdown)
    out_ += text + "\n\n";
  else
    wrapped(text, 2, 2);
}

void Page::entry(const std::string& name, const std::string& measured, const Row& details) {
  if (style_.markdown) {
    out_ += fmt::format("**{}** · {}\n", name, measured);
    for (const std::string& detail : details) out_ += "- " + detail + "\n";
    out_ += "\n";
    return;
  }
  const int gap = kColumns - 2 - width(name) - width(measured);
  out_ += "  " + paint("1", name);
  if (measured.empty())
    out_ += "\n";
  else if (gap >= 2)
    out_ += std::string(static_cast<size_t>(gap), ' ') + measured + "\n";
  else
    out_ += "\n" + padded(measured, kColumns, true) + "\n";
  for (const std::string& detail : details) wrapped(detail, 6, 9);
}

void Page::table(const Row& head, const std::vector<Row>& rows) {
  std::vector<int> widths;
  for (size_t c = 0; c < head.size(); ++c) {
    widths.push_back(width(head[c]));
    for (const Row& row : rows) widths[c] = std::max(widths[c], width(row[c]));
  }
  int total = 1;
  for (int w : widths) total += w + 1;
  if (!style_.markdown && total > kColumns) {  // the first column on a line of its own
    const auto without_first = [](const Row& row) {
      Row rest = row;
      rest[0].clear();
      return rest;
    };
    std::vector<int> narrow = widths;
    narrow[0] = 4;
    table_row({head[0]}, {widths[0]}, true);
    table_row(without_first(head), narrow, true);
    for (const Row& row : rows) {
      table_row({row[0]}, {widths[0]}, false);
      table_row(without_first(row), narrow, false);
    }
    return;
  }
  table_row(head, widths, true);
  if (style_.markdown) {
    out_ += "|";
    for (size_t c = 0; c < head.size(); ++c) out_ += c ? "---:|" : "---|";
    out_ += "\n";
  }
  for (const Row& row : rows) table_row(row, widths, false);
  if (style_.markdown) out_ += "\n";
}

void Page::check(bool ok, const std::string& name, const std::string& expected,
                 const std::string& found) {
  if (style_.markdown) {
    out_ += fmt::format("- {} **{}**: {}; expected: {}\n", ok ? "✓" : "✗ FAILED", name, found,
                        expected);
    return;
  }
  out_ += paint(ok ? "32" : "1;31", ok ? "  ✓ " : "  ✗ FAILED ") + name + "\n";
  wrapped(found + (ok ? "" : "; expected: " + expected), 6, 6);
}

void Page::verdict(bool ok, const std::string& text) {
  out_ += (style_.markdown ? "\n" : "") + paint(ok ? "1;32" : "1;31", text) + "\n";
}

std::string Page::paint(const char* code, const std::string& text) const {
  return style_.color ? fmt::format("\033[{}m{}\033[0m", code, text) : text;
}

void Page::table_row(const Row& row, const std::vector<int>& widths, bool head) {
  if (style_.markdown) {
    out_ += fmt::format("| {} |\n", fmt::join(row, " | "));
    return;
  }
  std::string text = " ";
  for (size_t c = 0; c < row.size(); ++c) text += " " + padded(row[c], widths[c], c > 0);
  text.erase(text.find_last_not_of(' ') + 1);
  out_ += (head ? paint("2", text) : text) + "\n";
}

// Words over as many lines as they need.
void Page::wrapped(const std::string& text, int first, int next) {
  std::string line(static_cast<size_t>(first), ' ');
  bool empty = true;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find(' ', at), text.size());
    const std::string word = text.substr(at, end - at);
    if (!empty && width(line) + 1 + width(word) > kColumns) {
      out_ += line + "\n";
      line = std::string(static_cast<size_t>(next), ' ');
      empty = true;
    }
    line += (empty ? "" : " ") + word;
    empty = false;
    at = end + 1;
  }
  out_ += line + "\n";
}

bool stdout_takes_color() {
  if (colors_refused() || !isatty(STDOUT_FILENO)) return false;
  char target[64] = {};
  const std::string link = fmt::format("/proc/{}/fd/1", getppid());
  if (readlink(link.c_str(), target, sizeof target - 1) <= 0) return false;
  const std::string_view name = target;
  return name.starts_with("/dev/pts/") || name.starts_with("/dev/tty");
}

}  // namespace qshard
