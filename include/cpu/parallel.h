// A fixed number of OpenMP threads. Work is cut at places that do not depend on the number of
// threads, and every piece is computed the same way whichever thread takes it, so results are
// bitwise the same for any team.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <exception>

namespace qshard::cpu {

class Team {
 public:
  explicit Team(int threads) : threads_(threads) {}
  int threads() const { return threads_; }

  // body(task, thread) for every task in [0, tasks), in any order; thread < threads(). Throws what
  // a task threw, after all have ended.
  template <typename F>
  void tasks(int64_t tasks, F&& body) const {
    const int team = static_cast<int>(std::min<int64_t>(threads_, tasks));
    if (team <= 1) {
      for (int64_t task = 0; task < tasks; ++task) body(task, 0);
      return;
    }
    std::exception_ptr error;  // an exception may not leave an OpenMP region
#pragma omp parallel for num_threads(team) schedule(dynamic)
    for (int64_t task = 0; task < tasks; ++task) {
      try {
        body(task, omp_get_thread_num());
      } catch (...) {
#pragma omp critical(qshard_team_error)
        error = std::current_exception();
      }
    }
    if (error) std::rethrow_exception(error);
  }

  // body(begin, end) on ranges that cover [0, n), cut at multiples of `grain`.
  template <typename F>
  void ranges(int64_t n, int64_t grain, F&& body) const {
    const int64_t grains = (n + grain - 1) / grain;
    const int64_t team = std::max<int64_t>(1, std::min<int64_t>(threads_, grains));
    tasks(team, [&](int64_t task, int) {
      const int64_t begin = task * grains / team * grain;
      const int64_t end = std::min(n, (task + 1) * grains / team * grain);
      if (begin < end) body(begin, end);
    });
  }

 private:
  int threads_;
};

}  // namespace qshard::cpu
