// Threads of one parallel region that wait for one another many times.

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

// A barrier. Who waits looks for some microseconds, which is longer than another thread of the team
// takes to finish its part, and shorter than it takes to be woken; then it sleeps, so that a thread
// that lost its core to another process can have this one's.
class Team {
 public:
  // Until all `num_threads` of the region are here.
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
