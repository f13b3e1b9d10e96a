#include "train/value_stages.h"

namespace qshard {
namespace {

constexpr int64_t kShown = 3;  // rows and columns at each end

}  // namespace

int find_parameter(const UnitLayout& layout, int64_t layer, const std::string& name) {
  const std::string prefix = fmt::format("model.layers.{}.", layer);
  int found = -1;
  std::vector<std::string> known;
  for (int i = 0; i < layout.size(); ++i) {
    if (!layout.params()[i].name.starts_with(prefix)) continue;
    known.push_back(layout.params()[i].name);
    const bool whole = known.back() == name || known.back().ends_with("." + name) ||
                       known.back().ends_with("." + name + ".weight");
    if (!whole) continue;
    if (found >= 0)
      fail_usage("--tensor {} could be {} or {}", name, layout.params()[found].name, known.back());
    found = i;
  }
  if (found < 0) fail_usage("--tensor {}: expected one of {}", name, fmt::join(known, ", "));
  return found;
}

void ValueStages::add(const char* stage, const char* meaning, const std::vector<float>& values,
                      bool full) {
  const int64_t first = full ? 0 : rows_.begin, n = full ? total_rows_ : rows_.size();
  Document lines = Document::array();
  for (int64_t r = 0; r < n; ++r) {
    if (r >= kShown && r + kShown < n) continue;
    std::vector<float> shown;
    for (int64_t c = 0; c < columns_; ++c)
      if (c < kShown || c + kShown >= columns_) shown.push_back(values[r * columns_ + c]);
    lines.push_back({{"row", first + r}, {"values", shown}});
  }
  stages_.push_back({{"stage", stage},
                     {"meaning", meaning},
                     {"rows", {first, first + n}},
                     {"columns", columns_},
                     {"shown_at_each_end", kShown},
                     {"lines", lines}});
}

}  // namespace qshard
