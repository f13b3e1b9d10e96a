#include "harness.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "report.h"
#include "tracker.h"

namespace cudasim_test {
namespace {

constexpr int WRONG_RESULT = 9;

int passed = 0, failed = 0;

struct Outcome {
  int status;
  std::string output;
};

Outcome run_child(int seed, const std::function<void()>& body) {
  int ends[2];
  if (pipe(ends) != 0) std::abort();
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDERR_FILENO);
    close(ends[0]);
    close(ends[1]);
    setenv("CUDASIM_SEED", std::to_string(seed).c_str(), 1);
    cudasim::set_seed(static_cast<uint64_t>(seed));
    alarm(60);
    body();
    _exit(0);
  }
  close(ends[1]);
  Outcome outcome{};
  char buffer[4096];
  for (ssize_t bytes; (bytes = read(ends[0], buffer, sizeof buffer)) > 0;)
    outcome.output.append(buffer, static_cast<size_t>(bytes));
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  outcome.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return outcome;
}

// How often a fault has to be seen, and whether a wrong result counts.
int required(Caught caught) {
  switch (caught) {
    case Caught::never:
      return 0;
    case Caught::by_tracker:
      return tracker_build() ? SEEDS : 0;
    case Caught::by_wrong_sum:
    case Caught::always:
      return SEEDS;
    case Caught::sometimes:
      return tracker_build() ? SEEDS : 1;
  }
  return 0;
}

}  // namespace

bool tracker_build() { return cudasim::tracker_enabled; }

void scenario(const std::string& name, Caught caught, const std::string& report,
              const std::function<void()>& body) {
  int reports = 0, wrong = 0;
  std::string problem;
  for (int seed = 1; seed <= SEEDS; ++seed) {
    const Outcome outcome = run_child(seed, body);
    const bool sanitizer = outcome.output.find("runtime error: ") != std::string::npos ||
                           outcome.output.find("AddressSanitizer") != std::string::npos;
    if (outcome.status == cudasim::FAILURE_STATUS || sanitizer) {
      ++reports;
      const bool named = sanitizer || outcome.output.find(report) != std::string::npos;
      if (caught == Caught::never || !named) problem = outcome.output;
    } else if (outcome.status == WRONG_RESULT) {
      ++wrong;
      if (caught == Caught::never || caught == Caught::always) problem = outcome.output;
    } else if (outcome.status != 0) {
      problem = "status " + std::to_string(outcome.status) + "\n" + outcome.output;
    }
  }
  // The tracker must name the fault itself.
  const int seen = tracker_build() ? reports : reports + wrong;
  const bool good = problem.empty() && seen >= required(caught);
  (good ? passed : failed) += 1;
  std::printf("%s %-44s reports %2d, wrong results %2d of %d seeds\n", good ? "ok    " : "FAILED",
              name.c_str(), reports, wrong, SEEDS);
  if (!problem.empty()) std::printf("%s\n", problem.c_str());
}

void rank_scenario(const std::string& name, Caught caught, const std::string& report,
                   const RankScenario& run) {
  scenario(name, caught, report, [run] {
    for (const char* variable : {"OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM",
                                 "OMPI_MCA_rmaps_base_oversubscribe"})
      setenv(variable, "1", 1);
    const std::string ranks = std::to_string(run.ranks);
    execlp("mpirun", "mpirun", "-n", ranks.c_str(), run.program, run.argument, nullptr);
    std::perror("mpirun");
    _exit(1);
  });
}

void expect(bool condition, const char* text, const char* file, int line) {
  if (condition) return;
  std::fprintf(stderr, "%s:%d: expected %s\n", file, line, text);
  std::fflush(stderr);
  _exit(WRONG_RESULT);
}

int finish() {
  std::printf("tests: %d passed, %d failed\n", passed, failed);
  return failed > 0;
}

}  // namespace cudasim_test
