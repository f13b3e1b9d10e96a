// The plan of a step against the step itself, segment by segment and byte by byte.
#include "train/plan.h"

#include "tiny_model.h"
#include "train/memory_fit.h"

namespace qshard {
namespace {

PlanRequest request_of(const TinyRun& run, int64_t accumulation) {
  const World& world = test_world();
  return {run.config,        run.fsdp, run.transport, world.size(),
          world.node_size(), run.B,    run.T,         accumulation};
}

std::vector<TinyRun> runs() {
  std::vector<TinyRun> runs;
  for (const char* transport : {"shm", "mpi"})
    for (const DType dtype : {DType::f32, DType::bf16})
      for (const bool sparing : {true, false}) {
        TinyRun run;
        run.config.num_hidden_layers = 3;
        run.config.tie_word_embeddings = sparing;
        run.transport = transport;
        run.fsdp.param_dtype = dtype;
        run.fsdp.reduce_dtype = dtype;
        run.fsdp.reshard_after_forward = sparing;
        run.fsdp.reduce_every_microbatch = sparing;
        run.fsdp.prefetch = sparing ? 2 : 0;
        run.fsdp.activation_checkpoint =
            sparing ? ActivationCheckpoint::full : ActivationCheckpoint::none;
        runs.push_back(run);
        run.fsdp.layers_per_unit = 2;
        runs.push_back(run);
        if (test_world().size() % 2) continue;
        run.fsdp.mesh = fmt::format("2x{}", test_world().size() / 2);
        runs.push_back(run);
        if (transport != std::string("mpi") || test_world().size() % 4) continue;
        run.fsdp.mesh = "full";
        run.fsdp.reshard_after_forward = true;
        run.fsdp.reshard_ranks = 2;
        runs.push_back(run);
      }
  return runs;
}

int64_t expect_plan_of(const TinyRun& run) {  // returns its total
  const Device& device = *test_backend().device;
  std::array<int64_t, kSegments.size()> before{};
  for (const Segment s : kSegments) before[static_cast<size_t>(s)] = device.bytes_held(s);
  const auto engine = run.engine();
  const Plan plan = plan_step(request_of(run, 1));
  for (const Segment s : kSegments)
    EXPECT_EQ(plan[s], device.bytes_held(s) - before[static_cast<size_t>(s)])
        << run.transport << " " << dtype_name(run.fsdp.param_dtype) << " " << segment_name(s);
  return plan.total();
}

TEST(Plan, HoldsTheBytesOfTheRun) {
  for (TinyRun run : runs()) {
    const int64_t apart = expect_plan_of(run);
    run.fsdp.gradients_over_activations = true;
    EXPECT_LT(expect_plan_of(run), apart);
  }
}

TEST(Plan, GradientsLieOverActivationsWhereAStepReducesThemOnce) {
  PlanRequest request;
  for (const bool every : {true, false})
    for (const int64_t accumulation : {1, 2}) {
      request.fsdp.reduce_every_microbatch = every;
      request.set_accumulation(accumulation);
      EXPECT_EQ(request.fsdp.gradients_over_activations, accumulation == 1 || !every);
    }
}

TEST(Plan, MovesTheBytesOfTheRun) {
  for (const TinyRun& run : runs()) {
    const auto engine = run.engine();
    const auto batch = some_batches(run, 1, 2 * run.B * test_world().size()).front();
    engine->compute_gradients(deal(batch, run.B, Deal::split));
    const Traffic planned = plan_step(request_of(run, 2)).traffic,
                  moved = engine->sharding().traffic();
    EXPECT_EQ(planned.gathers, moved.gathers);
    EXPECT_EQ(planned.reduces, moved.reduces);
    EXPECT_EQ(planned.gather_logical_bytes, moved.gather_logical_bytes);
    EXPECT_EQ(planned.reduce_logical_bytes, moved.reduce_logical_bytes);
  }
}

// The same operators on the same shapes in the same order, with the transport's calls between them.
void expect_spans_of_the_run(int layers_per_unit) {
  TinyRun run;
  run.config.num_hidden_layers = 3;
  run.transport = "mpi";
  run.fsdp.layers_per_unit = layers_per_unit;
  const std::vector<Span> real = spans_of_a_step(run);
  const std::vector<Span> planned = plan_step(request_of(run, 1)).spans;
  // A rank without rows of a parameter has no update of it.
  auto without_optimizer = [](std::vector<Span> spans) {
    std::erase_if(spans, [](const Span& s) { return s.phase == "optimizer" || s.phase.empty(); });
    return spans;
  };
  const auto a = without_optimizer(planned), b = without_optimizer(real);
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].name, b[i].name);
    EXPECT_EQ(a[i].unit, b[i].unit);
    EXPECT_EQ(a[i].flops, b[i].flops);
    EXPECT_EQ(a[i].logical_bytes, b[i].logical_bytes);
    ASSERT_EQ(a[i].tensors.size(), b[i].tensors.size());
    for (size_t t = 0; t < a[i].tensors.size(); ++t)
      EXPECT_EQ(a[i].tensors[t].shape, b[i].tensors[t].shape) << a[i].name;
  }
}

TEST(Plan, HasTheSpansOfTheRun) {
  for (int layers_per_unit : {1, 2}) expect_spans_of_the_run(layers_per_unit);
}

// A model and a machine that do not fit here.
TEST(Plan, NeedsNoMemoryForWhatItPlans) {
  PlanRequest request;
  request.config = tiny_config();
  request.config.hidden_size = 8192;
  request.config.intermediate_size = 28672;
  request.config.num_hidden_layers = 80;
  request.config.num_attention_heads = 64;
  request.config.num_key_value_heads = 8;
  request.config.head_dim = 128;
  request.config.vocab_size = 151936;
  request.transport = "nccl";
  request.ranks = 512;
  request.ranks_per_node = 8;
  request.B = 1;
  request.T = 8192;
  request.fsdp.param_dtype = DType::bf16;
  const Plan plan = plan_step(request);
  // Moments of 2 · 4 bytes a parameter, split over the ranks; padding adds less than 1 %.
  const double state = 8.0 * static_cast<double>(request.config.num_parameters()) / 512;
  EXPECT_GE(static_cast<double>(plan[Segment::moments]), state);
  EXPECT_LE(static_cast<double>(plan[Segment::moments]), 1.01 * state);
  double flops = 0;
  for (const Span& span : plan.spans)
    if (span.name.starts_with("linear") || span.name.starts_with("attention"))
      flops += static_cast<double>(span.flops);
  const double model =
      request.config.train_flops_per_token(request.T) * static_cast<double>(request.B * request.T);
  EXPECT_NEAR(flops, model, 1e-3 * model);
}

// Before anything of the run is allocated; with what to do about it.
TEST(Plan, OffloadedStatesHaveToFitIntoTheHost) {
  PlanRequest request;
  request.config = tiny_config();
  request.transport = "nccl";
  request.ranks = request.ranks_per_node = 2;
  request.fsdp.offload_optimizer = true;
  const Plan plan = plan_step(request);
  ASSERT_GT(plan.host_total(), 0);
  MemoryOptions options;
  options.host_budget = plan.host_total();
  EXPECT_EQ(fit_memory(request, options, plan.total()).host_total(), plan.host_total());

  const auto error = [](PlanRequest r, const MemoryOptions& o, int64_t budget) -> std::string {
    try {
      fit_memory(r, o, budget);
    } catch (const Error& e) {
      EXPECT_EQ(e.code, kExitUsage);
      return e.what();
    }
    return "";
  };
  options.host_budget -= 1;
  const std::string text = error(request, options, plan.total());
  for (const char* part :
       {"fsdp.offload optimizer needs ", "Use more ranks, or --fsdp.offload none", "host moments"})
    EXPECT_NE(text.find(part), std::string::npos) << part << " in " << text;
  EXPECT_EQ(text.find("checkpoint.async"), std::string::npos);

  options.host_budget = plan.host_total() + 999;
  options.host_others = 1000;  // copies of saves behind training
  EXPECT_NE(error(request, options, plan.total()).find("or --checkpoint.async false"),
            std::string::npos);

  // What is proposed to a run that does not fit into its GPU has to fit into the host.
  request.fsdp.offload_optimizer = false;
  request.fsdp.activation_checkpoint = ActivationCheckpoint::full;
  PlanRequest offloaded = request;
  offloaded.fsdp.offload_optimizer = true;
  const int64_t budget = plan_step(offloaded).total();
  ASSERT_LT(budget, plan_step(request).total());
  const std::string proposal = "fits: --fsdp.offload optimizer (";
  for (const bool room : {true, false}) {
    options = {};
    options.host_budget = plan_step(offloaded).host_total() - (room ? 0 : 1);
    EXPECT_EQ(error(request, options, budget).find(proposal) != std::string::npos, room);
  }
}

}  // namespace
}  // namespace qshard
