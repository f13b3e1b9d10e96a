#include "cli/sample_text.h"

#include <algorithm>
#include <charconv>
#include <cstdio>

namespace qshard {
namespace {

std::string recorded(const TrainedModel& model) {
  return model.tokenizer.empty()
             ? fmt::format("{} does not record a tokenizer", model.path)
             : fmt::format("{} has the tokenizer '{}'", model.path, model.tokenizer);
}

}  // namespace

bool samples_text(const TrainedModel& model, const std::string& tokenizer, bool has_ids) {
  if (tokenizer == "ids" || (tokenizer == "auto" && (has_ids || model.tokenizer != kByteTokenizer)))
    return false;
  if (has_ids) fail_usage("--prompt-ids goes with --tokenizer ids, found bytes");
  if (model.config.vocab_size < kByteVocabSize)
    fail_usage("{}: bytes are {} tokens, the model has vocab_size {}: use --prompt-ids", model.path,
               kByteVocabSize, model.config.vocab_size);
  return true;
}

std::vector<int32_t> byte_prompt(const std::string& text) {
  std::vector<int32_t> ids = {static_cast<int32_t>(kByteEndOfDocument)};
  for (char c : text) ids.push_back(static_cast<uint8_t>(c));
  return ids;
}

std::vector<int32_t> id_prompt(const TrainedModel& model, const std::string& text,
                               const std::string& ids) {
  if (!text.empty())
    fail_usage(
        "--prompt needs a model whose tokens are bytes, {}: give ids with --prompt-ids, or "
        "--tokenizer bytes if you know that they are",
        recorded(model));
  if (ids.empty())
    fail_usage("{}: give the first tokens as --prompt-ids 1,2,3 (-: from standard input)",
               recorded(model));
  std::vector<int32_t> numbers;
  const char *at = ids.data(), *const end = at + ids.size();
  const auto is_gap = [](char c) { return c == ',' || std::isspace(static_cast<uint8_t>(c)); };
  while ((at = std::find_if_not(at, end, is_gap)) != end) {
    const char* const stop = std::find_if(at, end, is_gap);
    int32_t id = 0;
    const auto [rest, error] = std::from_chars(at, stop, id);
    if (error != std::errc() || rest != stop)
      fail_usage("--prompt-ids: '{}' is not a token id", std::string(at, stop));
    numbers.push_back(id);
    at = stop;
  }
  return numbers;
}

void SampleOutput::show(const std::string& text) {
  text_ += text;
  if (json_) return;
  fmt::print("{}", text);
  std::fflush(stdout);
}

void SampleOutput::begin_sample(int64_t sample) {
  sample_ = sample;
  if (!json_ && options_.samples > 1)
    fmt::print("{}--- sample {} of {}\n", sample ? "\n" : "", sample + 1, options_.samples);
  if (!json_) fmt::print("{}", prompt_);
}

void SampleOutput::end_sample() {
  show(bytes_ ? stream_.finish() : "");
  if (!json_) fmt::print("\n");
  nlohmann::ordered_json sample = {{"ids", ids_}};
  if (bytes_) sample["text"] = text_;
  sample["ended"] = ids_.back() == options_.end ? "document" : "tokens";
  samples_.push_back(std::move(sample));
  ids_.clear();
  text_.clear();
}

void SampleOutput::token(int64_t sample, int32_t id) {
  if (sample != sample_) {
    if (sample_ >= 0) end_sample();
    begin_sample(sample);
  }
  ids_.push_back(id);
  ++tokens_;
  if (!bytes_)
    show(fmt::format("{}{}", ids_.size() > 1 ? " " : "", id));
  else if (id != options_.end)
    show(stream_.push(static_cast<uint8_t>(id)));
}

void SampleOutput::finish(const TrainedModel& model, int ranks, double seconds) {
  end_sample();
  if (!json_) return;
  const ChoiceOptions& choice = options_.choice;
  const nlohmann::ordered_json document = {{"model", model.path},
                                           {"tokenizer", bytes_ ? kByteTokenizer : "ids"},
                                           {"vocab_size", model.config.vocab_size},
                                           {"prompt", prompt_},
                                           {"prompt_ids", options_.prompt},
                                           {"temperature", choice.greedy ? 0 : choice.temperature},
                                           {"top_k", choice.top_k},
                                           {"top_p", choice.top_p},
                                           {"greedy", choice.greedy},
                                           {"seed", options_.seed},
                                           {"param_dtype", dtype_name(options_.param_dtype)},
                                           {"ranks", ranks},
                                           {"seconds", seconds},
                                           {"tokens_per_s", static_cast<double>(tokens_) / seconds},
                                           {"samples", samples_}};
  fmt::print("{}\n", document.dump(2, ' ', false, nlohmann::json::error_handler_t::replace));
}

}  // namespace qshard
