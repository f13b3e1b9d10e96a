// One table of options gives the command line, the help, the JSON of a run and the settings table.
//
//   OptionTable t;
//   t.section("optim", "AdamW");
//   t.add("optim.lr", config.lr, "peak learning rate").at_least(0);
//   t.add("train.param_dtype", config.param_dtype, "dtype of …").one_of({"f32", "bf16"});
//
// Values come from, in this order: the default in the struct, the JSON file (nested objects or dotted
// keys), the command line `--section.key value`. An unknown key, a wrong type or a value out of range
// is a usage error that names the key, the place (file or command line), the value, what is allowed
// and, for a misspelt key, the nearest known one.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/check.h"

namespace qshard {

class Option {
 public:
  Option& one_of(std::vector<std::string> values);
  Option& at_least(double value);
  Option& at_most(double value);
  Option& unit(std::string unit);  // shown in help and table, e.g. "tokens"

  std::string key, doc, unit_name, type;            // type: "int", "number", "text", "bool"
  std::vector<std::string> choices;
  double min = -std::numeric_limits<double>::infinity(), max = std::numeric_limits<double>::infinity();
  std::function<void(const nlohmann::json&)> set;   // throws on a wrong type
  std::function<nlohmann::json()> get;
  nlohmann::json default_value;
  bool changed = false;                             // set by file or command line
};

class OptionTable {
 public:
  void section(std::string name, std::string doc);
  // T: int, int64_t, uint64_t, double, float, bool, std::string
  template <typename T>
  Option& add(std::string key, T& target, std::string doc);

  void load_json(const nlohmann::json& values, const std::string& where);
  void set_text(const std::string& key, const std::string& text, const std::string& where);
  void add_to(CLI::App& app);             // one --section.key option each, grouped by section, applied in set_text

  nlohmann::json to_json() const;         // nested by section, every option
  std::string to_table() const;           // aligned text: key, value, unit, doc; changed values marked with *

 private:
  struct Section { std::string name, doc; };
  Option& find(const std::string& key, const std::string& where);
  void check(const Option& option, const nlohmann::json& value, const std::string& where) const;
  std::vector<Section> sections_;
  std::vector<std::unique_ptr<Option>> options_;
};

// Text of a JSON file; comments allowed. Errors name file, line and column.
nlohmann::json parse_json(const std::string& text, const std::string& where);
std::string read_file(const std::string& path);  // whole file; throws naming path and errno text

template <typename T>
Option& OptionTable::add(std::string key, T& target, std::string doc) {
  auto option = std::make_unique<Option>();
  option->key = std::move(key);
  option->doc = std::move(doc);
  option->type = std::is_same_v<T, bool> ? "bool" : std::is_integral_v<T> ? "int"
                 : std::is_floating_point_v<T> ? "number" : "text";
  option->set = [&target](const nlohmann::json& v) { target = v.get<T>(); };
  option->get = [&target] { return nlohmann::json(target); };
  option->default_value = nlohmann::json(target);
  options_.push_back(std::move(option));
  return *options_.back();
}

}  // namespace qshard
