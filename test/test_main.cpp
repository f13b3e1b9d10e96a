#include "test_main.h"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "cpu/backend_cpu.h"

namespace qshard {
namespace {

World* world = nullptr;

// Written by the alarm's handler, which may not format text.
char timeout_message[512];

void on_alarm(int) {
  const ssize_t written = write(STDERR_FILENO, timeout_message, std::strlen(timeout_message));
  (void)written;
  abort();  // mpirun ends the other ranks
}

int timeout_seconds() {
  const char* text = std::getenv("QSHARD_TEST_TIMEOUT");
  return text ? std::atoi(text) : 120;
}

std::string full_name(const testing::TestInfo& test) {
  return fmt::format("{}.{}", test.test_suite_name(), test.name());
}

void print_failure(const testing::TestPartResult& part) {
  const std::string prefix = world->size() > 1 ? fmt::format("rank {}: ", world->rank()) : "";
  const char* file = part.file_name() ? part.file_name() : "unknown file";
  std::string text = fmt::format("{}:{}: failure\n{}", file, part.line_number(), part.message());
  std::string lines = prefix;
  for (char c : text) {
    lines += c;
    if (c == '\n') lines += prefix;
  }
  std::fprintf(stderr, "%s\n", lines.c_str());
}

// Makes the ranks agree on the result of each test.
class RankListener : public testing::EmptyTestEventListener {
 public:
  void OnTestStart(const testing::TestInfo& test) override {
    fmt::format_to_n(timeout_message, sizeof timeout_message - 1,
                     "rank {}: {} has not ended after {} s (QSHARD_TEST_TIMEOUT)\n", world->rank(),
                     full_name(test), timeout_seconds());
    alarm(timeout_seconds());
  }

  void OnTestPartResult(const testing::TestPartResult& part) override {
    if (part.failed()) print_failure(part);
  }

  void OnTestEnd(const testing::TestInfo& test) override {
    int64_t failures = test.result()->Failed();
    world->all_reduce_sum(&failures, 1);
    alarm(0);
    std::memset(timeout_message, 0, sizeof timeout_message);
    if (failures > 0)
      failed_.push_back(full_name(test));
    else if (test.result()->Skipped())
      ++skipped_;
    else
      ++passed_;
    if (world->rank() == 0 && failures > 0)
      std::fprintf(stderr, "FAILED %s on %d of %d ranks\n", full_name(test).c_str(),
                   static_cast<int>(failures), world->size());
  }

  void print_summary() const {
    std::printf("tests: %d passed, %d failed", passed_, static_cast<int>(failed_.size()));
    if (skipped_ > 0) std::printf(", %d skipped", skipped_);
    std::printf("\n");
    for (const std::string& name : failed_) std::printf("  failed: %s\n", name.c_str());
  }
  bool any_failed() const { return !failed_.empty(); }

 private:
  int passed_ = 0, skipped_ = 0;
  std::vector<std::string> failed_;
};

int run_tests() {
  auto& listeners = testing::UnitTest::GetInstance()->listeners();
  delete listeners.Release(listeners.default_result_printer());
  auto* ranks = new RankListener;  // owned by gtest
  listeners.Append(ranks);
  signal(SIGALRM, on_alarm);
  const int result = RUN_ALL_TESTS();
  // Failures outside of tests (a suite's set-up) are in `result` alone.
  int64_t bad = result != 0 || ranks->any_failed();
  world->all_reduce_sum(&bad, 1);
  if (world->rank() == 0) ranks->print_summary();
  return bad != 0;
}

}  // namespace

World& test_world() { return *world; }

Backend& test_backend() {
  static std::optional<Backend> backend;
  if (!backend) backend = make_cpu_backend(test_world().threads_per_rank());
  return *backend;
}

}  // namespace qshard

int main(int argc, char** argv) try {
  qshard::World world(&argc, &argv);
  qshard::world = &world;
  testing::InitGoogleTest(&argc, argv);
  const int result = qshard::run_tests();
  world.finalize();
  return result;
} catch (const std::exception& error) {
  std::fprintf(stderr, "test program: %s\n", error.what());
  if (qshard::world) qshard::world->abort(1);
  return 1;
}
