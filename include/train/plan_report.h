// What `qshard plan` says: one JSON document, of which the text is a view.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "backends.h"
#include "train/timeline.h"

namespace qshard {

// Bytes, elements and FLOPs are integers of one rank and one step, times are seconds. Without
// hardware there are no times. `tokens`: of the whole training, 0: none given.
nlohmann::ordered_json plan_report(const PlanRequest& request,
                                   const std::optional<Hardware>& hardware, double tokens);
std::string plan_text(const nlohmann::ordered_json& report);

// Settings with as many tokens a step (micro-batch × accumulation, activation checkpointing,
// reshard_after_forward) that fit into `memory_bytes`, fastest first: their reports.
std::vector<nlohmann::ordered_json> search_plans(const PlanRequest& request,
                                                 const Hardware& hardware, int64_t memory_bytes,
                                                 double tokens);
std::string search_text(const std::vector<nlohmann::ordered_json>& reports);

// A profile of this machine under the ranks of `world`, measured with real steps of the request's
// model in f32 and bf16. Collective; the document is rank 0's.
nlohmann::ordered_json calibrate(const PlanRequest& request, World& world, Backend& backend);

}  // namespace qshard
