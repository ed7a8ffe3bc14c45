// Barrier for threads of one parallel region that wait for one another many times.

#pragma once

#include <atomic>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

inline void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Barrier of a team. A waiting thread polls for some microseconds, longer than another thread takes
// to finish its part and shorter than a wake-up takes. Then it sleeps, so that a thread that lost
// its core to another process can use this thread's core.
class Team {
 public:
  // Waits until all `num_threads` of the region have arrived.
  void wait(int num_threads) {
    const int32_t now = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == num_threads - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(now + 1, std::memory_order_release);
      round_.notify_all();
      return;
    }
    for (int turn = 0; turn < kTurns; ++turn) {
      if (round_.load(std::memory_order_acquire) != now) return;
      pause_briefly();
    }
    while (round_.load(std::memory_order_acquire) == now) {
      round_.wait(now, std::memory_order_acquire);
    }
  }

 private:
  static constexpr int kTurns = 2000;
  alignas(64) std::atomic<int32_t> arrived_{0};
  alignas(64) std::atomic<int32_t> round_{0};
};

}  // namespace
