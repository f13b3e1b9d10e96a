// The walkthrough's checks are met by honest transports and by no other.
#include "train/walkthrough.h"

#include <functional>

#include "forwarding.h"
#include "tiny_model.h"
#include "train/walkthrough_checks.h"

namespace qshard {
namespace {

WalkthroughOptions tiny_walk() {
  WalkthroughOptions options;
  options.config = tiny_config();
  options.seq = 5;
  options.fsdp.param_dtype = DType::fp16;
  options.fsdp.reduce_dtype = DType::fp16;
  return options;
}

struct CountsTooMuch final : Forwarding {
  using Forwarding::Forwarding;
  void count() override {
    Forwarding::count();
    traffic_.gather_logical_bytes += 64 * traffic_.gathers;
  }
};

struct HidesCopies final : Forwarding {
  using Forwarding::Forwarding;
  void count() override {
    Forwarding::count();
    traffic_.reduce_copied_bytes = traffic_.reduce_copied_bytes / 2;
  }
};

struct ShardOfWrongSize final : Forwarding {
  using Forwarding::Forwarding;
  Tensor shard(int unit, int piece) override {
    Tensor rows = inner_->shard(unit, piece);
    if (unit == 1 && piece == 2) rows.shape[0] += 8;  // never touched: the unit cuts its true rows
    return rows;
  }
};

struct SumInsteadOfMean final : Forwarding {
  using Forwarding::Forwarding;
  void reduce_wait(int unit, std::span<const Tensor> dst, Factor scale, bool accumulate) override {
    Forwarding::reduce_wait(unit, dst, scale.get() * 1.1f, accumulate);
  }
};

struct GathersAgain final : Forwarding {  // in the middle of a layer: not local any more
  using Forwarding::Forwarding;
  void* gather_wait(int unit) override {
    void* full = inner_->gather_wait(unit);
    if (unit == 1) {
      inner_->reshard(unit);
      inner_->gather_start(unit);
      full = inner_->gather_wait(unit);
      count();
    }
    return full;
  }
};

// Only where gradients are summed over replicas.
struct OfReplicas : Forwarding {
  using Forwarding::Forwarding;
  int add_unit(const UnitSpec& spec) override {
    sums_ = spec.name.ends_with(ReplicaSum::kNameSuffix);
    return Forwarding::add_unit(spec);
  }
  bool sums_ = false;
};

struct MiscountsReplicas final : OfReplicas {
  using OfReplicas::OfReplicas;
  void count() override {
    Forwarding::count();
    if (sums_) traffic_.gather_logical_bytes += 2 * traffic_.gathers;
  }
};

struct WrongSumOfReplicas final : OfReplicas {
  using OfReplicas::OfReplicas;
  void reduce_wait(int unit, std::span<const Tensor> dst, Factor scale, bool accumulate) override {
    Forwarding::reduce_wait(unit, dst, sums_ ? scale.get() * 1.1f : scale, accumulate);
  }
};

// Names of the checks that are not met, on rank 0; the report's verdict is that of the list.
std::vector<std::string> failed_checks(const WalkthroughOptions& options) {
  const WalkthroughReport report = run_walkthrough(options, test_world(), test_backend());
  std::vector<std::string> failed;
  if (test_world().rank() != 0) return failed;
  for (const Document& check : report.document["checks"])
    if (!check["ok"].get<bool>())
      failed.push_back(check["name"].get<std::string>() + ": " + check["found"].get<std::string>());
  EXPECT_EQ(report.ok, failed.empty());
  EXPECT_EQ(report.document["ok"].get<bool>(), failed.empty());
  return failed;
}

void expect_all_met(const WalkthroughOptions& options) {
  for (const std::string& text : failed_checks(options)) ADD_FAILURE() << text;
}

template <typename Faulty>
void expect_failed(const std::string& part, const std::string& mesh = "full") {
  WalkthroughOptions options = tiny_walk();
  options.fsdp.mesh = mesh;
  options.wrap_transport = [](std::unique_ptr<Collectives> inner) {
    return std::make_unique<Faulty>(std::move(inner));
  };
  const std::vector<std::string> failed = failed_checks(options);
  if (test_world().rank() != 0) return;
  bool found = false;
  for (const std::string& text : failed) found = found || text.find(part) != std::string::npos;
  EXPECT_TRUE(found) << fmt::format("{}", fmt::join(failed, "\n"));
}

TEST(Walkthrough, ChecksAreMetInEveryMode) {
  expect_all_met(tiny_walk());
  for (const char* transport : {"shm", "mpi"})
    for (DType dtype : {DType::f32, DType::bf16, DType::fp16}) {
      WalkthroughOptions options = tiny_walk();
      options.transport = transport;
      options.fsdp.param_dtype = dtype;
      options.fsdp.reduce_dtype = dtype == DType::f32 ? DType::bf16 : DType::f32;
      options.layer = 1;
      options.accumulation = 3;
      expect_all_met(options);
      options.fsdp.reduce_every_microbatch = false;
      options.fsdp.reshard_after_forward = false;
      options.fsdp.prefetch = 0;
      expect_all_met(options);
    }
}

TEST(Walkthrough, TheBackendIsUntracedAfterwards) {
  const Ops* ops = test_backend().ops.get();
  run_walkthrough(tiny_walk(), test_world(), test_backend());
  EXPECT_EQ(test_backend().ops.get(), ops);
}

TEST(Walkthrough, ForwardingAloneIsHonest) {
  WalkthroughOptions options = tiny_walk();
  options.wrap_transport = [](std::unique_ptr<Collectives> inner) {
    return std::make_unique<Forwarding>(std::move(inner));
  };
  expect_all_met(options);
}

TEST(Walkthrough, MiscountingTransportIsFound) {
  expect_failed<CountsTooMuch>("bytes of every gather and reduction");
}

TEST(Walkthrough, HiddenCopiesAreFound) {
  if (test_world().size() > 1) expect_failed<HidesCopies>("bytes really copied");
}

TEST(Walkthrough, ShardOfWrongSizeIsFound) { expect_failed<ShardOfWrongSize>("k_proj"); }

TEST(Walkthrough, WrongMeanIsFound) { expect_failed<SumInsteadOfMean>("mean gradient"); }

TEST(Walkthrough, WrongSumOverReplicasIsFound) {
  if (test_world().size() == 1) return;
  const std::string replicas = fmt::format("{}x1", test_world().size());
  expect_failed<WrongSumOfReplicas>("mean gradient", replicas);
  expect_failed<MiscountsReplicas>("all-reduce over replicas", replicas);
}

// Sums whose every rounding goes up as far as it can are within NCCL's bound; a sum that lacks one
// rank of an equal share is not.
TEST(Walkthrough, BoundOfSumsRoundedAtEveryHop) {
  for (DType dtype : {DType::bf16, DType::fp16})
    for (int ranks : {1, 2, 3, 4, 8}) {
      const double u = dtype == DType::fp16 ? 0x1p-11 : 0x1p-8;
      double sum = 1 + u;
      for (int rank = 1; rank < ranks; ++rank) sum = (sum + 1 + u) * (1 + u);
      const double bound = ranks * mean_gradient_bound("nccl", dtype, {1, ranks, ""});
      EXPECT_LE(sum - ranks, bound * (1 + 1e-12)) << ranks;
      EXPECT_LT(bound, 1) << ranks;
      EXPECT_DOUBLE_EQ(mean_gradient_bound("mpi", dtype, {1, ranks, ""}), u);
      EXPECT_GT(mean_gradient_bound("mpi", dtype, {2, ranks, ""}), 3 * u);
    }
  EXPECT_EQ(mean_gradient_bound("nccl", DType::f32, {2, 4, ""}), 0);
}

TEST(Walkthrough, SecretGatherIsFound) {
  if (test_world().size() > 1) expect_failed<GathersAgain>("bytes of every gather");
}

}  // namespace
}  // namespace qshard
