// Ranks of a group: processes of one machine that compute a step together and exchange results
// through shared memory. A waiting rank polls for a while, then sleeps in the kernel, so that other
// ranks can use its core. It gives up when the group is aborted or the timeout has passed, and then
// computes with numbers that are never used.

#pragma once

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdint>
#include <cstring>
#include <ctime>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "lanes.h"
#include "team.h"

namespace {

// Counter on which others wait, in a cache line of its own.
struct alignas(64) RankWord {
  std::atomic<uint32_t> value{0}, sleepers{0};
};
static_assert(sizeof(RankWord) == 64);

// `failure` is the reason of a group's end, or 0. For kTimedOut, the upper bits have the rank that
// did not arrive.
constexpr uint32_t kAborted = 1, kTimedOut = 2;
constexpr int kRankShift = 8;

// Start of the shared memory: the last exchange at which each rank has arrived, and the number of
// messages that rank 0 has posted. kMaxRanks equals that of `engine.kernels.ranks`.
constexpr int kMaxRanks = 16;
struct RankHeader {
  RankWord arrived[kMaxRanks];
  RankWord posted;
  RankWord failure;
};

// View of a group by one process; Python's `RankView` in `engine.kernels.ranks`. From `buffers` on,
// each rank has two buffers of `buffer_floats`, for even and odd exchanges: a rank that arrives at
// an exchange has read the data of the previous one. The rank has written `brought` numbers in
// total and waited `waited_ns` for the others.
struct Ranks {
  RankHeader* header;
  float* buffers;
  int64_t buffer_floats;
  int64_t timeout_ns;
  int64_t brought, waited_ns;
  int32_t rank, size;
  uint32_t exchange;

  float* buffer(int of_rank) const {
    return buffers + (2 * of_rank + (exchange & 1)) * buffer_floats;
  }
  bool has_failed() const {
    return header->failure.value.load(std::memory_order_acquire) != 0;
  }
};

inline long futex(std::atomic<uint32_t>& word, int operation, uint32_t value,
                  const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, timeout, nullptr,
                 0);
}

inline void set_word(RankWord& word, uint32_t value) {
  word.value.store(value, std::memory_order_seq_cst);
  if (word.sleepers.load(std::memory_order_seq_cst) > 0) {
    futex(word.value, FUTEX_WAKE, INT_MAX, nullptr);
  }
}

// Ends the group; all waits end soon.
inline void fail_ranks(RankHeader& header, uint32_t why) {
  uint32_t none = 0;
  header.failure.value.compare_exchange_strong(none, why);
  for (RankWord& word : header.arrived) futex(word.value, FUTEX_WAKE, INT_MAX, nullptr);
  futex(header.posted.value, FUTEX_WAKE, INT_MAX, nullptr);
}

// Waits until the word has reached `value`, modulo 2^32. Returns false if the timeout, if any, has
// passed or the group has failed.
inline bool await_word(const Ranks& ranks, RankWord& word, uint32_t value, int64_t timeout_ns) {
  const auto is_there = [&](uint32_t now) { return static_cast<int32_t>(now - value) >= 0; };
  constexpr int kTurns = 4000;
  for (int turn = 0; turn < kTurns; ++turn) {
    if (is_there(word.value.load(std::memory_order_acquire))) return true;
    pause_briefly();
  }
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  // Short sleeps, because an abort may miss a thread that is about to sleep.
  constexpr timespec kSlice{0, 50'000'000};
  bool came = false;
  word.sleepers.fetch_add(1, std::memory_order_seq_cst);
  while (true) {
    const uint32_t now = word.value.load(std::memory_order_seq_cst);
    came = is_there(now);
    if (came || ranks.has_failed()) break;
    if (timeout_ns > 0 && Clock::now() - begin > std::chrono::nanoseconds(timeout_ns)) break;
    futex(word.value, FUTEX_WAIT, now, &kSlice);
  }
  word.sleepers.fetch_sub(1, std::memory_order_relaxed);
  return came;
}

// Arrives at an exchange, after the rank has written `num_brought` numbers to its buffer, and waits
// for the others.
inline void meet_ranks(Ranks& ranks, int64_t num_brought) {
  RankHeader& header = *ranks.header;
  const auto begin = std::chrono::steady_clock::now();
  set_word(header.arrived[ranks.rank], ranks.exchange + 1);
  for (int rank = 0; rank < ranks.size; ++rank) {
    if (rank == ranks.rank || ranks.has_failed()) continue;
    if (!await_word(ranks, header.arrived[rank], ranks.exchange + 1, ranks.timeout_ns)) {
      fail_ranks(header, kTimedOut | static_cast<uint32_t>(rank) << kRankShift);
    }
  }
  ranks.brought += num_brought;
  ranks.waited_ns += std::chrono::nanoseconds(std::chrono::steady_clock::now() - begin).count();
}

// Sums elements `begin` ... `end - 1` of all ranks' buffers in the order of the ranks: the same
// bits on each. With `adds` the sums are added to `total`, otherwise they replace it.
template <typename T>
inline void sum_ranks(const Ranks& ranks, T* total, int64_t begin, int64_t end, bool adds) {
  for (int64_t at = begin; at < end; at += kLanes) {
    Floats sum = adds ? load_some(total + at, end - at) : Floats{};
    for (int rank = 0; rank < ranks.size; ++rank) {
      sum += load_some(ranks.buffer(rank) + at, end - at);
    }
    store_some(total + at, sum, end - at);
  }
}

// Replaces `rows` by their sum over the ranks.
template <typename T>
inline void all_reduce(Ranks& ranks, T* rows, int64_t count) {
  for (int64_t begin = 0; begin < count; begin += ranks.buffer_floats) {
    const int64_t size = std::min(count - begin, ranks.buffer_floats);
    float* own = ranks.buffer(ranks.rank);
    for (int64_t at = 0; at < size; at += kLanes) {
      store_some(own + at, load_some(rows + begin + at, size - at), size - at);
    }
    meet_ranks(ranks, size);
    sum_ranks(ranks, rows + begin, 0, size, false);
    ++ranks.exchange;
  }
}

}  // namespace
