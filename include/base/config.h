// One table of options gives the command line, the help, the JSON of a run and the settings table.
//
//   OptionTable t;
//   t.section("optim", "AdamW");
//   t.add("optim.lr", config.lr, "peak learning rate").at_least(0);
//   t.add("optim.decay", config.decay, "what is decayed").one_of({"all", "matrices"});
//
// Values come from, in this order: the default in the struct, the JSON file (nested objects or
// dotted keys), the command line `--section.key value`. The command line wins whatever the order of
// the calls. An unknown key, a wrong type or a value out of range is a usage error that names the
// key, the place (file or command line), the value, what is allowed and, for a misspelt key, the
// nearest known one. The table keeps references to the targets and must outlive the CLI::App it was
// added to.
#pragma once

#include <CLI/CLI.hpp>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/check.h"

namespace qshard {

enum class OptionType : uint8_t { integer, number, text, boolean };
enum class OptionSource : uint8_t { default_value, file, command_line };

struct Option {
  Option& one_of(std::vector<std::string> values);
  Option& at_least(double value);
  Option& at_most(double value);
  Option& unit(std::string name);  // shown in help and table, e.g. "tokens"

  std::string allowed() const;  // e.g. "an integer from 1 to 8"

  std::string key, doc, unit_name;
  OptionType type = OptionType::text;
  std::vector<std::string> choices;  // of a text option; empty: any
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
  std::function<bool(const nlohmann::json&)> set;  // false when the target cannot hold the value
  std::function<nlohmann::json()> get;
  nlohmann::json default_value;
  OptionSource source = OptionSource::default_value;
};

class OptionTable {
 public:
  void section(std::string name, std::string doc);
  // `key` is "section.name"; the section was declared before.
  // T: int, int64_t, uint64_t, double, float, bool, std::string
  template <typename T>
  Option& add(std::string key, T& target, std::string doc);

  // `where` names the file. Options that the command line has set keep their value, after a check
  // of the one in the file.
  void load_json(const nlohmann::json& values, const std::string& where);
  // One value as text, as on a command line: integers may be written 1e6, bools are true or false.
  void set_text(const std::string& key, const std::string& text, const std::string& where);
  // One --section.key option each, grouped by section, applied by set_text while `app` is parsed.
  // An unknown option of `app` becomes a usage error with the nearest known name.
  void add_to(CLI::App& app);

  nlohmann::json to_json() const;  // nested by section, every option
  // Values by section, at most 100 columns wide; changed ones marked with *, options that are unset
  // (empty or 0 by default) left out.
  std::string to_table() const;

 private:
  struct Section {
    std::string name, doc;
  };
  Option* try_find(const std::string& key) const;
  Option& find(const std::string& key, const std::string& where) const;
  Option& insert(Option option);
  void load_object(const nlohmann::json& object, const std::string& prefix,
                   const std::string& where, std::vector<std::string>& seen);
  void assign(Option& option, const nlohmann::json& value, const std::string& where,
              OptionSource source);
  std::vector<Section> sections_;
  std::vector<std::unique_ptr<Option>> options_;
};

// The known name nearest to a misspelt one, or "" when none is near.
std::string nearest_name(const std::string& name, const std::vector<std::string>& known);

// Text of a JSON file; comments allowed. Errors name file, line and column; a key given twice in
// one object is an error too.
nlohmann::json parse_json(const std::string& text, const std::string& where,
                          ExitCode exit_code = kExitUsage);
bool colors_refused();  // by a NO_COLOR in the environment that is not empty
std::string read_file(const std::string& path);  // whole file; throws naming path and errno text

template <typename T>
Option& OptionTable::add(std::string key, T& target, std::string doc) {
  Option option;
  option.key = std::move(key);
  option.doc = std::move(doc);
  option.type = std::is_same_v<T, bool>       ? OptionType::boolean
                : std::is_integral_v<T>       ? OptionType::integer
                : std::is_floating_point_v<T> ? OptionType::number
                                              : OptionType::text;
  option.set = [&target](const nlohmann::json& value) {
    if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) {
      const bool fits = value.is_number_unsigned() ? std::in_range<T>(value.get<uint64_t>())
                                                   : std::in_range<T>(value.get<int64_t>());
      if (!fits) return false;
    } else if constexpr (std::is_floating_point_v<T>) {
      if (!std::isfinite(value.get<T>())) return false;
    }
    target = value.get<T>();
    return true;
  };
  option.get = [&target] { return nlohmann::json(target); };
  option.default_value = nlohmann::json(target);
  return insert(std::move(option));
}

}  // namespace qshard
