// Whole tensors from shards and back, by Hugging Face name.
#pragma once

#include <string>

#include "comm/gather.h"
#include "io/safetensors.h"
#include "model/qwen3_model.h"

namespace qshard {

enum class ExportWhat { weights, gradients };  // f32 master weights; reduced gradients

// Rank 0 writes one f32 safetensors file, values times `scale`; a tied head is not stored. Collective.
void export_model(const World& world, Qwen3Model& model, ExportWhat what, const std::string& path,
                  float scale = 1);

// Every rank reads its own rows of the f32, bf16 or fp16 tensors. Missing, extra or reshaped tensors
// are errors that name them; a lm_head.weight in the file of a tied model is accepted. Collective.
void import_weights(const World& world, Qwen3Model& model, const SafetensorsFile& file);

}  // namespace qshard
