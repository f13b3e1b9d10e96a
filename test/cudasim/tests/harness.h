// A small test main: each scenario runs in a child process for every seed, because whatever the
// simulator catches ends the process.
#pragma once

#include <functional>
#include <string>

namespace cudasim_test {

constexpr int SEEDS = 20;

// In how many of the SEEDS the fault must show.
enum class Caught {
  never,         // a correct program: status 0 and no report in any seed
  by_tracker,    // in every seed by the tracker build; the other builds are not asked
  by_wrong_sum,  // in every seed of each build, by a report or by a wrong result
  always,        // in every seed of each build, by a report
  sometimes,     // in every seed by the tracker, in at least one seed by the plain build
};

// Runs `body` (which throws or fails an EXPECT when results are wrong) and counts a test. `report`
// must be part of what is printed wherever the simulator reports.
void scenario(const std::string& name, Caught caught, const std::string& report,
              const std::function<void()>& body);

// The same for a program of several ranks: `program` is run under mpirun -n `ranks` with
// `argument`.
struct RankScenario {
  const char* program;
  const char* argument;
  int ranks;
};
void rank_scenario(const std::string& name, Caught caught, const std::string& report,
                   const RankScenario& run);

// Fails the scenario that runs: the child ends with another status than a report of the simulator.
void expect(bool condition, const char* text, const char* file, int line);

int finish();  // prints the summary, returns the exit status
bool tracker_build();

}  // namespace cudasim_test

#define EXPECT(condition) ::cudasim_test::expect((condition), #condition, __FILE__, __LINE__)
