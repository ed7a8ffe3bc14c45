// What this machine could do at best, one number a line: bytes per second that all threads read from
// memory, and FLOP/s of the vector units' dot products of bfloat16 pairs from registers alone.

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include <omp.h>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

constexpr int kRepeats = 7;

template <typename Work>
double least_seconds(Work&& work) {
  double least_s = 1e9;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    const auto begin = std::chrono::steady_clock::now();
    work();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    if (took.count() < least_s) least_s = took.count();
  }
  return least_s;
}

double read_rate() {
  using Words = uint64_t __attribute__((vector_size(64)));
  constexpr int64_t kVectors = int64_t{1} << 23;  // 512 MiB, well over the last level's cache
  static std::vector<Words> memory(kVectors);
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < kVectors; ++i) memory[i] = Words{} + static_cast<uint64_t>(i);
  return kVectors * sizeof(Words) / least_seconds([] {
#pragma omp parallel
    {
      Words sums[4] = {};
#pragma omp for schedule(static)
      for (int64_t i = 0; i < kVectors; i += 4) {
        for (int j = 0; j < 4; ++j) sums[j] += memory[i + j];
      }
      volatile uint64_t kept = (sums[0] + sums[1] + sums[2] + sums[3])[0];
      (void)kept;
    }
  });
}

double product_rate() {
#ifdef __AVX512BF16__
  constexpr int64_t kTurns = 10000000;
  constexpr int kSums = 12, kFlopsEach = 64;
  const double took_s = least_seconds([] {
#pragma omp parallel
    {
      __m512 sums[kSums];
      for (auto& sum : sums) sum = _mm512_setzero_ps();
      auto left = (__m512bh)_mm512_set1_epi16(0x3f80), right = left;
      for (int64_t turn = 0; turn < kTurns; ++turn) {
        asm volatile("" : "+v"(left), "+v"(right));
#pragma GCC unroll 12
        for (auto& sum : sums) sum = _mm512_dpbf16_ps(sum, left, right);
      }
      for (auto& sum : sums) asm volatile("" : : "v"(sum));
    }
  });
  return omp_get_max_threads() * static_cast<double>(kTurns) * kSums * kFlopsEach / took_s;
#else
  return 0.0;
#endif
}

}  // namespace

int main() { std::printf("%.0f\n%.0f\n", read_rate(), product_rate()); }
