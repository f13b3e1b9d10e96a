#include "base/config.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <set>

namespace qshard {
namespace {

using nlohmann::json;

constexpr const char* kCommandLine = "command line";
constexpr int kMaxDepth = 64;  // of a JSON file

std::string text_of(const json& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

const char* type_name(OptionType type) {
  switch (type) {
    case OptionType::integer:
      return "INT";
    case OptionType::number:
      return "NUMBER";
    case OptionType::boolean:
      return "true|false";
    case OptionType::text:
      break;
  }
  return "TEXT";
}

std::string range_text(double min, double max) {
  if (std::isinf(min) && std::isinf(max)) return "";
  if (std::isinf(max)) return fmt::format("at least {}", min);
  if (std::isinf(min)) return fmt::format("at most {}", max);
  return fmt::format("from {} to {}", min, max);
}

// Insertions, deletions and replacements that lead from a to b.
size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row.back();
}

std::string last_part(const std::string& key) { return key.substr(key.rfind('.') + 1); }

std::string suggestion(const std::string& name, const std::vector<std::string>& known) {
  const std::string nearest = nearest_name(name, known);
  return nearest.empty() ? "see --help for the known ones"
                         : fmt::format("did you mean {}?", nearest);
}

// 1e6 and 2.0 count as integers; beyond 2^53 a double no longer holds every integer.
json as_integer(const json& value) {
  if (!value.is_number_float()) return value;
  const double number = value.get<double>();
  constexpr double kExact = 9007199254740992.0;
  if (std::trunc(number) != number || std::abs(number) > kExact) return value;
  return static_cast<int64_t>(number);
}

template <typename T>
bool parse_whole(const std::string& text, T& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

// The JSON value that `text` stands for; text that is no value of the type stays text, which
// assign() then refuses.
json value_of(OptionType type, const std::string& text) {
  if (type == OptionType::text) return text;
  if (type == OptionType::boolean) {
    if (text == "true" || text == "false") return text == "true";
    return text;
  }
  int64_t signed_value;
  uint64_t unsigned_value;
  double number;
  if (parse_whole(text, signed_value)) return signed_value;
  if (parse_whole(text, unsigned_value)) return unsigned_value;
  if (parse_whole(text, number) && std::isfinite(number)) return number;
  return text;
}

bool has_type(OptionType type, const json& value) {
  switch (type) {
    case OptionType::integer:
      return value.is_number_integer();
    case OptionType::number:
      return value.is_number() && std::isfinite(value.get<double>());
    case OptionType::boolean:
      return value.is_boolean();
    case OptionType::text:
      break;
  }
  return value.is_string();
}

}  // namespace

Option& Option::one_of(std::vector<std::string> values) {
  choices = std::move(values);
  return *this;
}

Option& Option::at_least(double value) {
  min = value;
  return *this;
}

Option& Option::at_most(double value) {
  max = value;
  return *this;
}

Option& Option::unit(std::string name) {
  unit_name = std::move(name);
  return *this;
}

std::string Option::allowed() const {
  if (type == OptionType::boolean) return "true or false";
  if (type == OptionType::text)
    return choices.empty() ? "a text" : fmt::format("{}", fmt::join(choices, ", "));
  const std::string range = range_text(min, max);
  return fmt::format("{}{}{}", type == OptionType::integer ? "an integer" : "a number",
                     range.empty() ? "" : " ", range);
}

void OptionTable::section(std::string name, std::string doc) {
  sections_.push_back({std::move(name), std::move(doc)});
}

Option& OptionTable::insert(Option option) {
  const std::string name = option.key.substr(0, option.key.find('.'));
  const bool known = std::any_of(sections_.begin(), sections_.end(),
                                 [&](const Section& s) { return s.name == name; });
  QS_CHECK(known && name != option.key, "option {} has no declared section", option.key);
  QS_CHECK(!try_find(option.key), "option {} is added twice", option.key);
  options_.push_back(std::make_unique<Option>(std::move(option)));
  return *options_.back();
}

Option* OptionTable::try_find(const std::string& key) const {
  for (const auto& option : options_)
    if (option->key == key) return option.get();
  return nullptr;
}

Option& OptionTable::find(const std::string& key, const std::string& where) const {
  if (Option* option = try_find(key)) return *option;
  std::vector<std::string> known;
  for (const auto& option : options_) known.push_back(option->key);
  fail_usage("{}: unknown option {}; {}", where, key, suggestion(key, known));
}

void OptionTable::assign(Option& option, const json& given, const std::string& where,
                         OptionSource source) {
  const json value = option.type == OptionType::integer ? as_integer(given) : given;
  bool ok = has_type(option.type, value);
  if (ok && value.is_number())
    ok = value.get<double>() >= option.min && value.get<double>() <= option.max;
  if (ok && !option.choices.empty())
    ok = std::count(option.choices.begin(), option.choices.end(), text_of(value)) > 0;
  const bool keep = option.source == OptionSource::command_line && source == OptionSource::file;
  if (ok) {
    const json before = option.get();
    ok = option.set(value);
    if (ok && keep) option.set(before);
  }
  if (!ok)
    fail_usage("{}: {} = {} is not allowed; expected {}{}{}", where, option.key, given.dump(),
               option.allowed(), option.unit_name.empty() ? "" : ", in ", option.unit_name);
  if (!keep) option.source = source;
}

void OptionTable::load_json(const json& values, const std::string& where) {
  if (!values.is_object())
    fail_usage("{}: expected a JSON object of options, found {}", where, values.type_name());
  std::vector<std::string> seen;
  load_object(values, "", where, seen);
}

void OptionTable::load_object(const json& object, const std::string& prefix,
                              const std::string& where, std::vector<std::string>& seen) {
  for (const auto& [name, value] : object.items()) {
    const std::string key = prefix + name;
    if (value.is_object() && !try_find(key)) {
      load_object(value, key + ".", where, seen);
      continue;
    }
    Option& option = find(key, where);
    if (std::count(seen.begin(), seen.end(), key))
      fail_usage("{}: {} is given twice, nested and as a dotted key; keep one", where, key);
    seen.push_back(key);
    assign(option, value, where, OptionSource::file);
  }
}

void OptionTable::set_text(const std::string& key, const std::string& text,
                           const std::string& where) {
  Option& option = find(key, where);
  assign(option, value_of(option.type, text), where, OptionSource::command_line);
}

void OptionTable::add_to(CLI::App& app) {
  for (const auto& option : options_) {
    const std::string key = option->key;
    const std::string name = key.substr(0, key.find('.'));
    const auto section = std::find_if(sections_.begin(), sections_.end(),
                                      [&](const Section& s) { return s.name == name; });
    std::string doc = option->doc;
    if (!option->choices.empty()) {
      doc += fmt::format(" ({})", fmt::join(option->choices, ", "));
    } else if (const std::string range = range_text(option->min, option->max); !range.empty()) {
      doc += fmt::format(" ({})", range);
    }
    if (!option->unit_name.empty()) doc += fmt::format(" [{}]", option->unit_name);
    app.add_option_function<std::string>(
           "--" + key, [this, key](const std::string& t) { set_text(key, t, kCommandLine); }, doc)
        ->type_name(type_name(option->type))
        ->default_str(text_of(option->default_value))
        ->group(fmt::format("{}: {}", section->name, section->doc));
  }
  app.allow_extras();
  app.parse_complete_callback([&app] {
    const std::vector<std::string> extra = app.remaining();
    if (extra.empty()) return;
    if (extra[0].rfind("--", 0) != 0)
      fail_usage("{}: unexpected argument '{}'; options are written --section.key value",
                 kCommandLine, extra[0]);
    std::vector<std::string> known;
    for (const CLI::Option* option : app.get_options())
      for (const std::string& name : option->get_lnames()) known.push_back("--" + name);
    const std::string name = extra[0].substr(0, extra[0].find('='));
    fail_usage("{}: unknown option {}; {}", kCommandLine, name, suggestion(name, known));
  });
}

json OptionTable::to_json() const {
  json all = json::object();
  for (const auto& option : options_) {
    json* place = &all;
    size_t begin = 0;
    for (size_t dot; (dot = option->key.find('.', begin)) != std::string::npos; begin = dot + 1)
      place = &(*place)[option->key.substr(begin, dot - begin)];
    (*place)[option->key.substr(begin)] = option->get();
  }
  return all;
}

std::string OptionTable::to_table() const {
  constexpr size_t kWidth = 100, kIndent = 12;
  std::string table;
  for (const Section& section : sections_) {
    std::string line = fmt::format("{:<{}}", section.name, kIndent);
    for (const auto& option : options_) {
      if (!option->key.starts_with(section.name + ".")) continue;
      const json value = option->get();
      const bool changed = value != option->default_value;
      if (!changed && (value == json("") || value == json(0) || value == json(0.0))) continue;
      const std::string unit = option->unit_name.empty() ? "" : " " + option->unit_name;
      const std::string item = fmt::format("{}{} {}{}", changed ? "*" : "", last_part(option->key),
                                           text_of(value), unit);
      if (line.size() > kIndent && line.size() + 3 + item.size() > kWidth) {
        table += line + '\n';
        line = std::string(kIndent, ' ');
      }
      line += (line.size() > kIndent ? " · " : "") + item;
    }
    if (line.size() > kIndent) table += line + '\n';
  }
  return table;
}

std::string nearest_name(const std::string& name, const std::vector<std::string>& known) {
  std::string nearest;
  size_t least = std::max<size_t>(2, name.size() / 4) + 1;
  for (const std::string& candidate : known) {
    const size_t distance = edit_distance(name, candidate);
    if (distance < least) {
      least = distance;
      nearest = candidate;
    }
  }
  if (!nearest.empty()) return nearest;
  // Right name, wrong or forgotten section.
  for (const std::string& candidate : known) {
    std::string bare = last_part(name);
    bare.erase(0, bare.find_first_not_of('-'));
    if (last_part(candidate) == bare) return candidate;
  }
  return "";
}

json parse_json(const std::string& text, const std::string& where, ExitCode exit_code) {
  std::vector<std::set<std::string>> keys;  // of the objects that are open
  const auto refuse = [&](int depth, json::parse_event_t event, json& parsed) {
    // What is parsed is later copied and printed by recursion.
    if (depth > kMaxDepth)
      throw Error(fmt::format("{}: nested deeper than {} levels", where, kMaxDepth), exit_code);
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end) keys.pop_back();
    if (event == json::parse_event_t::key && !keys.back().insert(parsed.get<std::string>()).second)
      throw Error(
          fmt::format("{}: the key {} appears twice in one object; keep one", where, parsed.dump()),
          exit_code);
    return true;
  };
  try {
    return json::parse(text, refuse, /*allow_exceptions=*/true,
                       /*ignore_comments=*/true);
  } catch (const json::out_of_range& error) {
    throw Error(fmt::format("{}: a number is too large: {}", where, error.what()), exit_code);
  } catch (const json::parse_error& error) {
    // The library numbers the bytes from 1; the byte it names is the last one it read.
    const size_t at = std::min(error.byte > 0 ? error.byte - 1 : 0, text.size());
    const auto line = 1 + std::count(text.begin(), text.begin() + at, '\n');
    const size_t line_begin = at == 0 ? 0 : text.rfind('\n', at - 1) + 1;
    std::string reason = error.what();
    const size_t colon = reason.find(": ");
    if (colon != std::string::npos) reason.erase(0, colon + 2);
    throw Error(fmt::format("{}: line {}, column {}: not valid JSON: {}", where, line,
                            at - line_begin + 1, reason),
                exit_code);
  }
}

bool colors_refused() {
  const char* value = std::getenv("NO_COLOR");
  return value && *value;
}

std::string read_file(const std::string& path) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"),
                                                             std::fclose);
  if (!file) fail("cannot open {}: {}", path, std::strerror(errno));
  std::string text;
  char buffer[1 << 16];
  for (size_t n; (n = std::fread(buffer, 1, sizeof buffer, file.get())) > 0;)
    text.append(buffer, n);
  if (std::ferror(file.get())) fail("cannot read {}: {}", path, std::strerror(errno));
  return text;
}

}  // namespace qshard
