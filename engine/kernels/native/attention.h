// Attention of single-token rows directly over the paged KV cache, in float32.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include <omp.h>

#include "kv_cache.h"
#include "lanes.h"

namespace {

// Prefetches the head at `from`. Blocks lie anywhere, so hardware prefetchers cannot predict them.
// Prefetching whole blocks would make lines wait for one another, so this goes head by head.
template <int kVectors, typename T>
inline void prefetch_head(const T* from) {
  constexpr int kLineBytes = 64;
  const char* bytes = reinterpret_cast<const char*>(from);
#pragma GCC unroll 16
  for (int at = 0; at < kVectors * kLanes * int{sizeof(T)}; at += kLineBytes) {
    __builtin_prefetch(bytes + at, 0, 2);
  }
}

// Computes scores[g][i] of kGroup query heads and the keys of tokens i = 0 ... count - 1, which are
// `stride` elements and `scale_stride` scales apart. Prefetches keys that are `ahead` elements
// further.
template <typename T, typename C, int kGroup, int kVectors>
void score(const T* queries, const C* keys, int64_t stride, const BFloat16* scales,
           int64_t scale_stride, int64_t count, float scale, float* scores, int64_t score_stride,
           int64_t ahead) {
  Floats query[kGroup][kVectors];
  for (int g = 0; g < kGroup; ++g) {
    load_head<Cache<C>::kScaled>(queries + g * kVectors * kLanes, query[g]);
    for (int v = 0; v < kVectors; ++v) query[g][v] *= scale;
  }
  int64_t i = 0;
  for (; i + 4 <= count; i += 4, keys += 4 * stride, scales += 4 * scale_stride) {
    Floats dots[kGroup][4] = {};
#pragma GCC unroll 4
    for (int token = 0; token < 4; ++token) {
      Floats key[kVectors];
      prefetch_head<kVectors>(keys + token * stride + ahead);
      load_cached(keys + token * stride, scales + token * scale_stride, key);
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 4
        for (int g = 0; g < kGroup; ++g) dots[g][token] += query[g][v] * key[v];
      }
    }
#pragma GCC unroll 4
    for (int g = 0; g < kGroup; ++g) store_sums(scores + g * score_stride + i, dots[g]);
  }
  for (; i < count; ++i, keys += stride, scales += scale_stride) {
    Floats key[kVectors];
    load_cached(keys, scales, key);
    for (int g = 0; g < kGroup; ++g) {
      Floats dot{};
      for (int v = 0; v < kVectors; ++v) dot += query[g][v] * key[v];
      scores[g * score_stride + i] = sum(dot);
    }
  }
}

// Adds weights[g][i] * value i to totals[g], over tokens i = 0 ... count - 1, as in `score`.
template <typename T, typename C, int kGroup, int kVectors>
void accumulate(const C* values, int64_t stride, const BFloat16* scales, int64_t scale_stride,
                int64_t count, const float* weights, int64_t weight_stride, float* totals,
                int64_t ahead) {
  Floats total[kGroup][kVectors];
  std::memcpy(total, totals, sizeof total);
  for (int64_t i = 0; i < count; ++i, values += stride, scales += scale_stride) {
    Floats value[kVectors];
    prefetch_head<kVectors>(values + ahead);
    load_cached(values, scales, value);
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 4
      for (int g = 0; g < kGroup; ++g) total[g][v] += weights[g * weight_stride + i] * value[v];
    }
  }
  std::memcpy(totals, total, sizeof total);
}

// Replaces the scores by exponentials of the scores minus their maximum; returns their sum.
float softmax_weights(float* scores, int64_t count, int64_t padded) {
  for (int64_t i = count; i < padded; ++i) scores[i] = -INFINITY;
  Floats best = load(scores);
  for (int64_t i = kLanes; i < padded; i += kLanes) {
    const Floats s = load(scores + i);
    best = s > best ? s : best;
  }
  float largest = best[0];
  for (int lane = 1; lane < kLanes; ++lane) largest = std::max(largest, best[lane]);
  Floats weights{};
  for (int64_t i = 0; i < padded; i += kLanes) {
    const Floats e = exponential(load(scores + i) - largest);
    weights += e;
    store(scores + i, e);
  }
  return sum(weights);
}

// Attention of one row over tokens first ... last - 1 of the blocks of `table`, for `heads` key
// heads from `head` on and their query heads. All heads of a block are read before the next block.
template <typename T, typename C, int kVectors>
void attend(const T* queries, const Cache<C>& cache, const int32_t* table, T* out, int64_t head,
            int64_t heads, int64_t group, int64_t first, int64_t last, float scale,
            float* scratch) {
  constexpr int64_t kHeadDim = kVectors * kLanes;
  constexpr int64_t kTile = kVectors <= 4 ? 4 : 2;  // query heads that fit the registers together
  const int64_t count = last - first, block_size = cache.block_size;
  const int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
  float* scores = scratch;
  float* totals = scratch + heads * group * padded;
  const auto each_run = [&](auto&& use) {
    for (int64_t position = first; position < last;) {
      const int64_t block = position / block_size;
      const int64_t end = std::min(last, (block + 1) * block_size);
      const int64_t slot = table[block] * block_size + position % block_size;
      const C* tokens = cache.token(slot) + head * kHeadDim;
      // Distance from a token of this block to the next block's; 0 for the last block.
      const int64_t next = end < last ? table[block + 1] : table[block];
      const int64_t ahead = (next - table[block]) * cache.block_stride;
      for (int64_t key = 0; key < heads; ++key) {
        const BFloat16* scales = nullptr;
        if constexpr (Cache<C>::kScaled) {
          scales = cache.scales(slot) + (head + key) * cache.head_scales();
        }
        for (int64_t g = 0; g < group; g += kTile) {
          use(tokens + key * kHeadDim, scales, key * group + g, std::min(kTile, group - g),
              position - first, end - position, ahead);
        }
      }
      position = end;
    }
  };
  const int64_t scale_stride = Cache<C>::kScaled ? cache.token_scales() : 0;
  each_run([&](const C* keys, const BFloat16* scales, int64_t query, int64_t taken, int64_t at,
               int64_t length, int64_t ahead) {
    auto run = taken == 4   ? score<T, C, kTile, kVectors>
               : taken == 3 ? score<T, C, std::min<int>(3, kTile), kVectors>
               : taken == 2 ? score<T, C, 2, kVectors>
                            : score<T, C, 1, kVectors>;
    float* own = scores + query * padded + at;
    run(queries + query * kHeadDim, keys, cache.token_stride, scales, scale_stride, length, scale,
        own, padded, ahead);
  });
  std::fill(totals, totals + heads * group * kHeadDim, 0.0f);
  float* sums = totals + heads * group * kHeadDim;
  for (int64_t query = 0; query < heads * group; ++query) {
    sums[query] = softmax_weights(scores + query * padded, count, padded);
  }
  each_run([&](const C* values, const BFloat16* scales, int64_t query, int64_t taken, int64_t at,
               int64_t length, int64_t ahead) {
    auto run = taken == 4   ? accumulate<T, C, kTile, kVectors>
               : taken == 3 ? accumulate<T, C, std::min<int>(3, kTile), kVectors>
               : taken == 2 ? accumulate<T, C, 2, kVectors>
                            : accumulate<T, C, 1, kVectors>;
    if constexpr (Cache<C>::kScaled) scales += cache.num_keys * cache.head_scales();
    run(values + cache.value_offset(), cache.token_stride, scales, scale_stride, length,
        scores + query * padded + at, padded, totals + query * kHeadDim, ahead);
  });
  for (int64_t query = 0; query < heads * group; ++query) {
    const float inverse = 1.0f / sums[query];
    store_head<Cache<C>::kScaled, kVectors>(out + query * kHeadDim, totals + query * kHeadDim, inverse);
  }
}

// Key heads, with their queries, of an item of work: with few rows, a row's heads are shared out.
inline int64_t heads_of_item(int64_t rows, int64_t num_keys, int num_threads) {
  int64_t heads = num_keys;
  while (heads % 2 == 0 && rows * (num_keys / heads) < 4 * num_threads) heads /= 2;
  return heads;
}

// Floats of scratch memory that `attend` needs.
inline size_t attend_scratch(int64_t heads, int64_t group, int64_t longest, int64_t head_dim) {
  return static_cast<size_t>(heads * group * (longest + kLanes + head_dim + 1));
}

template <typename T, typename C, int kVectors>
void decode_attention(const T* queries, int64_t query_stride, void* data, const int32_t* tables,
                      const int64_t* starts, const int32_t* lengths, T* out, int64_t rows,
                      int64_t num_queries, int64_t num_keys, int64_t block_size, int64_t window,
                      float scale) {
  constexpr int64_t kHeadDim = kVectors * kLanes;
  const Cache<C> cache(data, block_size, num_keys, kHeadDim);
  const int64_t group = num_queries / num_keys;
  int64_t longest = 0;
  for (int64_t row = 0; row < rows; ++row) longest = std::max<int64_t>(longest, lengths[row]);
  const int64_t heads = heads_of_item(rows, num_keys, omp_get_max_threads());
  const int64_t parts = num_keys / heads;
#pragma omp parallel if (rows * longest * num_keys > 64)
  {
    std::vector<float> scratch(attend_scratch(heads, group, longest, kHeadDim));
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < rows * parts; ++item) {
      // The longest rows are last in order and start first, so that no thread ends late on one.
      const int64_t row = rows - 1 - item / parts, head = item % parts * heads;
      const int64_t last = lengths[row];
      const int64_t first = window > 0 ? std::max<int64_t>(0, last - window) : 0;
      attend<T, C, kVectors>(queries + row * query_stride + head * group * kHeadDim, cache,
                             tables + starts[row],
                             out + (row * num_queries + head * group) * kHeadDim, head, heads,
                             group, first, last, scale, scratch.data());
    }
  }
}

template <typename T, typename C>
int decode_any(int64_t head_dim, const void* queries, int64_t query_stride, void* cache,
               const int32_t* tables, const int64_t* starts, const int32_t* lengths, void* out,
               int64_t rows, int64_t num_queries, int64_t num_keys, int64_t block_size,
               int64_t window, float scale) {
  auto run = head_dim == 32    ? decode_attention<T, C, 2>
             : head_dim == 64  ? decode_attention<T, C, 4>
             : head_dim == 96  ? decode_attention<T, C, 6>
             : head_dim == 128 ? decode_attention<T, C, 8>
             : head_dim == 256 ? decode_attention<T, C, 16>
                               : nullptr;
  if (run == nullptr) return 1;
  run(static_cast<const T*>(queries), query_stride, cache, tables, starts, lengths,
      static_cast<T*>(out), rows, num_queries, num_keys, block_size, window, scale);
  return 0;
}

}  // namespace
