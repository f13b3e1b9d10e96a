// Prompts of `qshard sample` as tokens, and its tokens as text, ids or JSON.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/utf8.h"
#include "io/corpus.h"
#include "train/generate.h"

namespace qshard {

// Whether tokens are bytes of text. `tokenizer`: auto, bytes or ids. Refuses bytes that the model
// cannot have.
bool samples_text(const TrainedModel& model, const std::string& tokenizer, bool has_ids);

// The end of a document, as before every document of a token file, then the bytes.
std::vector<int32_t> byte_prompt(const std::string& text);
// ids: integers with commas or white space between them.
std::vector<int32_t> id_prompt(const TrainedModel& model, const std::string& text,
                               const std::string& ids);

// Prints tokens as they come, or one JSON document at the end.
class SampleOutput {
 public:
  SampleOutput(bool json, bool bytes, std::string prompt, const GenerateOptions& options)
      : json_(json), bytes_(bytes), prompt_(std::move(prompt)), options_(options) {}
  void token(int64_t sample, int32_t id);  // samples in order
  void finish(const TrainedModel& model, int ranks, double seconds);

 private:
  void begin_sample(int64_t sample);
  void end_sample();
  void show(const std::string& text);

  bool json_, bytes_;
  std::string prompt_;
  const GenerateOptions& options_;
  int64_t sample_ = -1, tokens_ = 0;
  Utf8Stream stream_;
  std::vector<int32_t> ids_;  // of the sample so far
  std::string text_;
  nlohmann::ordered_json samples_ = nlohmann::ordered_json::array();
};

}  // namespace qshard
