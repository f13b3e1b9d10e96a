// Text for a terminal of 80 columns, with color where it is wanted, or the same as Markdown.
#pragma once

#include <string>
#include <vector>

namespace qshard {

struct PrintStyle {
  bool markdown = false, color = false;
};

using Row = std::vector<std::string>;

class Page {
 public:
  explicit Page(const PrintStyle& style) : style_(style) {}

  void title(const std::string& text);
  void section(const std::string& text);
  void line(const std::string& text);
  // Right of the name stands what was measured; below it details.
  void entry(const std::string& name, const std::string& measured, const Row& details);
  // The first column is text, the others stand right.
  void table(const Row& head, const std::vector<Row>& rows);
  void check(bool ok, const std::string& name, const std::string& expected,
             const std::string& found);
  void verdict(bool ok, const std::string& text);
  std::string take() { return std::move(out_); }

 private:
  std::string paint(const char* code, const std::string& text) const;
  void table_row(const Row& row, const std::vector<int>& widths, bool head);
  void wrapped(const std::string& text, int first, int next);

  PrintStyle style_;
  std::string out_;
};

// Whether stdout is a terminal that takes colors and nobody refuses them. mpirun gives its ranks a
// terminal of their own, whatever it does with their output: the stdout of the parent must be one
// as well.
bool stdout_takes_color();

}  // namespace qshard
