#include "train/stop_signals.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <thread>

#include "cpu/gemm.h"
#include "ops_reference.h"

namespace qshard {
namespace {

// Signals of a process, every few microseconds, for as long as it lives.
class SignalStream {
 public:
  ~SignalStream() {
    over_ = true;
    thread_.join();
  }

 private:
  std::atomic<bool> over_{false};
  std::thread thread_{[this] {
    while (!over_) {
      for (const int signal : {SIGTERM, SIGUSR1, SIGUSR2}) kill(getpid(), signal);
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }};
};

// See [Note: signals and generated code]: with a handler in this thread the heap is corrupted
// within the time of this test.
TEST(StopSignals, AreOneRequestAndDisturbNoProduct) {
  watch_stop_signals();
  EXPECT_FALSE(stop_requested());
  Matrix dy = Matrix::random(DType::f32, 8, 128, 1), w = Matrix::random(DType::f32, 128, 64, 2);
  cpu::Gemm gemm(1, true);
  Matrix expected(DType::f32, 8, 64);
  gemm.linear_dgrad(dy.tensor(), w.tensor(), expected.tensor(), false);
  const SignalStream stream;
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(1500);
  int wrong = 0;
  while (std::chrono::steady_clock::now() < end) {
    Matrix dx(DType::f32, 8, 64);
    gemm.linear_dgrad(dy.tensor(), w.tensor(), dx.tensor(), false);
    wrong += dx.values() != expected.values();
  }
  EXPECT_EQ(wrong, 0);
  EXPECT_TRUE(stop_requested());
}

}  // namespace
}  // namespace qshard
