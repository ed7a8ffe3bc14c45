// Paged KV cache of a layer, and RoPE together with the write to it.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "elementwise.h"
#include "lanes.h"

namespace {

// Elements of a head that share a scale; INT8_GROUP in engine/kv/cache.py. One scale for a head
// would lose its small elements, because some channels of keys are many times larger than others.
constexpr int64_t kScaleGroup = 32;

// Blocks of `block_size` tokens. A token has all keys, then all values. Entries in int8 have
// scales, one for each group of each head of each token in the same order, after the entries of
// their block. A NaN scale marks a group that is not finite. head_dim is a multiple of kScaleGroup.
template <typename C>
struct Cache {
  static constexpr bool kScaled = std::is_same_v<C, int8_t>;

  C* data;
  int64_t block_size, num_keys, head_dim, token_stride, scales_offset, block_stride;

  Cache(void* from, int64_t block_tokens, int64_t num_key_heads, int64_t head_size)
      : data(static_cast<C*>(from)),
        block_size(block_tokens),
        num_keys(num_key_heads),
        head_dim(head_size),
        token_stride(2 * num_key_heads * head_size),
        scales_offset(aligned(block_size * token_stride)),
        block_stride(kScaled ? aligned(scales_offset + block_size * token_scales() *
                                                           int64_t{sizeof(BFloat16)})
                             : block_size * token_stride) {}

  int64_t head_scales() const { return head_dim / kScaleGroup; }
  int64_t token_scales() const { return 2 * num_keys * head_scales(); }
  int64_t value_offset() const { return num_keys * head_dim; }
  C* token(int64_t slot) const {
    return data + slot / block_size * block_stride + slot % block_size * token_stride;
  }
  // Scales of all heads of a token; they exist for int8 only.
  BFloat16* scales(int64_t slot) const {
    auto* block =
        reinterpret_cast<BFloat16*>(data + slot / block_size * block_stride + scales_offset);
    return block + slot % block_size * token_scales();
  }

 private:
  // Rounds up to 16, so that the data after it can be read 16 bytes at a time.
  static constexpr int64_t aligned(int64_t bytes) { return (bytes + 15) / 16 * 16; }
};

// Loads a head of the cache; `scales` are those of its groups if it is int8.
template <int kVectors, typename C>
inline void load_cached(const C* from, const BFloat16* scales, Floats (&to)[kVectors]) {
  load_head<Cache<C>::kScaled>(from, to);
  if constexpr (Cache<C>::kScaled) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) to[v] *= widened(scales[v * kLanes / kScaleGroup]);
  }
}

// Quantizes a group to int8; its scale is the largest magnitude over 127, rounded to bfloat16.
template <typename T>
inline void quantize_group(const T* group, int8_t* codes, BFloat16* scale) {
  using Bytes = int8_t __attribute__((vector_size(kLanes)));
  Floats most{}, nothing{};
  for (int64_t i = 0; i < kScaleGroup; i += kLanes) {
    const Floats values = load(group + i), magnitudes = values < 0.0f ? -values : values;
    most = magnitudes > most ? magnitudes : most;
    nothing += values * 0.0f;
  }
  float largest = most[0];
  for (int lane = 1; lane < kLanes; ++lane) largest = std::max(largest, most[lane]);
  if (sum(nothing) != 0.0f) {  // NaN if an element is not finite
    std::memset(codes, 0, kScaleGroup);
    *scale = narrowed(std::numeric_limits<float>::quiet_NaN());
    return;
  }
  *scale = narrowed(largest / 127.0f);
  if (widened(*scale) == 0.0f) *scale = narrowed(1.0f);
  for (int64_t i = 0; i < kScaleGroup; i += kLanes) {
    // A scale near the least number of bfloat16 may be rounded far down.
    Floats whole = to_integer(load(group + i) / widened(*scale));
    whole = whole > 127.0f ? Floats{} + 127.0f : whole;
    whole = whole < -127.0f ? Floats{} - 127.0f : whole;
    const Bytes bytes = __builtin_convertvector(whole, Bytes);
    std::memcpy(codes + i, &bytes, sizeof bytes);
  }
}

// Stores keys and values `heads` [2 * num_keys, head_dim] of the token at `slot`.
template <typename T, typename C>
inline void store_token(const T* heads, const Cache<C>& cache, int64_t slot) {
  C* token = cache.token(slot);
  if constexpr (Cache<C>::kScaled) {
    BFloat16* scales = cache.scales(slot);
    for (int64_t group = 0; group < cache.token_scales(); ++group) {
      const int64_t at = group * kScaleGroup;
      quantize_group(heads + at, token + at, scales + group);
    }
  } else {
    std::memcpy(token, heads, static_cast<size_t>(cache.token_stride) * sizeof(C));
  }
}

template <typename T, typename C>
void rotate_store(T* heads, const float* cosines, const float* sines, const T* query_norm,
                  const T* key_norm, float epsilon, const Cache<C>& cache, const int64_t* slots,
                  int64_t rows, int64_t num_queries) {
  const int64_t head_dim = cache.head_dim, half = head_dim / 2;
  const int64_t stride = (num_queries + 2 * cache.num_keys) * head_dim;
#pragma omp parallel for schedule(static) if (rows * stride > 16384)
  for (int64_t row = 0; row < rows; ++row) {
    T* queries = heads + row * stride;
    T* keys = queries + num_queries * head_dim;
    const float *cosine = cosines + row * half, *sine = sines + row * half;
    rotate_heads(queries, num_queries, head_dim, cosine, sine, query_norm, epsilon);
    rotate_heads(keys, cache.num_keys, head_dim, cosine, sine, key_norm, epsilon);
    store_token(keys, cache, slots[row]);
  }
}

}  // namespace
