#include "train/stop_signals.h"

#include <pthread.h>

#include <atomic>
#include <csignal>
#include <thread>

#include "base/check.h"

namespace qshard {
namespace {

// [Note: signals and generated code]
// A signal handler must not run on the stack of a thread that computes. oneDNN 2.6's sgemm kernels
// keep data beyond the 128 bytes below the stack pointer that the x86-64 ABI protects; the frame of
// a handler overwrites it, and the product then writes anywhere (seen: a corrupted heap after one
// of some ten thousand signals). So these signals are blocked in all threads but one. Threads that
// MPI made earlier may still take a signal; they run no such code.
std::atomic<bool> requested{false};
static_assert(std::atomic<bool>::is_always_lock_free, "set by a signal handler");

sigset_t stop_signals() {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : {SIGTERM, SIGUSR1, SIGUSR2}) sigaddset(&set, signal);
  return set;
}

}  // namespace

void watch_stop_signals() {
  const sigset_t set = stop_signals();
  QS_CHECK(pthread_sigmask(SIG_BLOCK, &set, nullptr) == 0, "cannot block the stop signals");
  struct sigaction action {};
  action.sa_handler = [](int) { requested = true; };
  action.sa_flags = SA_RESTART;
  for (const int signal : {SIGTERM, SIGUSR1, SIGUSR2}) sigaction(signal, &action, nullptr);
  std::thread([set] {
    for (int signal = 0; sigwait(&set, &signal) == 0;) requested = true;
  }).detach();
}

bool stop_requested() { return requested; }

}  // namespace qshard
