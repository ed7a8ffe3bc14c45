// Attention of several new tokens of a sequence over its paged KV cache, in bfloat16. Keys and
// values are packed like the weights of a product. The softmax goes through sections of keys with a
// running maximum and sum (Milakov and Gimelshein 2018, arXiv:1805.02867; as in FlashAttention).

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "attention.h"
#include "lanes.h"
#include "products.h"

namespace {

// Keys of a section: with their values and the queries they fit the core's own cache.
constexpr int64_t kSectionKeys = 256;
// Finite number below any score: a section of which a row sees nothing gives no NaN, and the first
// visible score scales its contribution to 0.
constexpr float kUnseen = -1e30f;

// New tokens of one sequence: rows `begin` ... `end - 1` of the step, after `context` tokens.
struct Chunk {
  int64_t begin, end, context;
  const int32_t* table;
  BFloat16* packed;  // [num_keys][num_sections] of section_size()

  int64_t length() const { return context + end - begin; }
  int64_t num_sections() const { return (length() + kSectionKeys - 1) / kSectionKeys; }
  int64_t num_tiles() const { return (end - begin + kTileRows - 1) / kTileRows; }
};

inline int64_t section_size(int64_t head_dim) { return 2 * kSectionKeys * head_dim; }

// Packs keys as [panel of 16 keys][pair of elements][key][2], then values as [panel of 16
// elements][pair of keys][element][2]. Missing keys and values are 0.
template <int kVectors, typename C>
void pack_section(const Chunk& chunk, const Cache<C>& cache, int64_t head, int64_t section,
                  BFloat16* out) {
  constexpr int64_t kHeadDim = kVectors * kLanes;
  const int64_t first = section * kSectionKeys;
  const int64_t count = std::min(kSectionKeys, chunk.length() - first);
  // The products below read whole tiles.
  const int64_t filled = (count + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes);
  BFloat16* values = out + kSectionKeys * kHeadDim;
  for (int64_t i = 0; i < filled; ++i) {
    BFloat16 token[2][kHeadDim] = {};
    if (i < count) {
      const int64_t position = first + i;
      const int64_t slot = chunk.table[position / cache.block_size] * cache.block_size +
                           position % cache.block_size;
      const C* from = cache.token(slot) + head * kHeadDim;
      for (int of = 0; of < 2; ++of, from += cache.value_offset()) {
        if constexpr (Cache<C>::kScaled) {
          const BFloat16* scales =
              cache.scales(slot) + (of * cache.num_keys + head) * cache.head_scales();
          for (int64_t d = 0; d < kHeadDim; d += kLanes) {
            store(token[of] + d, load(from + d) * widened(scales[d / kScaleGroup]));
          }
        } else {
          std::memcpy(token[of], from, sizeof token[of]);
        }
      }
    }
    BFloat16* key = out + (i / kLanes * kHeadDim * kLanes) + 2 * (i % kLanes);
    for (int64_t pair = 0; pair < kHeadDim / 2; ++pair) {
      std::memcpy(key + pair * 2 * kLanes, token[0] + 2 * pair, 2 * sizeof(BFloat16));
    }
    for (int64_t d = 0; d < kHeadDim; ++d) {
      values[(d / kLanes * kSectionKeys + i / 2 * 2) * kLanes + 2 * (d % kLanes) + i % 2] =
          token[1][d];
    }
  }
}

// Scratch of one tile: scores, their weights, running sums.
template <int kVectors>
struct TileScratch {
  static constexpr int64_t kHeadDim = kVectors * kLanes;
  alignas(64) float scores[kTileRows][kSectionKeys];
  alignas(64) BFloat16 weights[kTileRows][kSectionKeys];
  alignas(64) float totals[kTileRows][kHeadDim];
  float largest[kTileRows], sums[kTileRows];
};

// Turns a row's scores into weights for the keys `begin` ... `end - 1` that it sees of `width`, and
// rescales the row's running sums to the new maximum.
template <int kVectors>
void weigh_row(TileScratch<kVectors>& scratch, int row, int64_t begin, int64_t end, int64_t width,
               float scale) {
  float* scores = scratch.scores[row];
  std::fill(scores, scores + std::clamp<int64_t>(begin, 0, width), kUnseen);
  std::fill(scores + std::clamp<int64_t>(end, 0, width), scores + width, kUnseen);
  Floats best = Floats{} + kUnseen;
  for (int64_t i = 0; i < width; i += kLanes) {
    const Floats s = load(scores + i) * scale;
    store(scores + i, s);
    best = s > best ? s : best;
  }
  float largest = scratch.largest[row];
  for (int lane = 0; lane < kLanes; ++lane) largest = std::max(largest, best[lane]);
  const float kept = exponential(Floats{} + (scratch.largest[row] - largest))[0];
  Floats sum_of{};
  for (int64_t i = 0; i < width; i += kLanes) {
    const Floats e = exponential(load(scores + i) - largest);
    sum_of += e;
    store(scratch.weights[row] + i, e);
  }
  for (int64_t d = 0; d < kVectors * kLanes; d += kLanes) {
    store(scratch.totals[row] + d, load(scratch.totals[row] + d) * kept);
  }
  scratch.sums[row] = scratch.sums[row] * kept + sum(sum_of);
  scratch.largest[row] = largest;
}

// Attends with kRows rows from `row` of a chunk on, of one query head; queries are `stride` apart.
template <int kVectors, int kRows>
void attend_tile(const Chunk& chunk, int64_t row, const BFloat16* queries, int64_t stride,
                 const BFloat16* packed, int64_t window, float scale, BFloat16* out,
                 int64_t out_stride, TileScratch<kVectors>& scratch) {
  constexpr int64_t kHeadDim = kVectors * kLanes;
  const int64_t position = chunk.context + row;
  const auto first_seen = [&](int64_t at) {
    return window > 0 ? std::max<int64_t>(0, at + 1 - window) : 0;
  };
  for (int r = 0; r < kRows; ++r) {
    std::fill(scratch.totals[r], scratch.totals[r] + kHeadDim, 0.0f);
    scratch.largest[r] = kUnseen;
    scratch.sums[r] = 0.0f;
  }
  const int64_t last_section = (position + kRows - 1) / kSectionKeys;
  for (int64_t s = first_seen(position) / kSectionKeys; s <= last_section; ++s) {
    const BFloat16* keys = packed + s * section_size(kHeadDim);
    const BFloat16* values = keys + kSectionKeys * kHeadDim;
    const int64_t begin = s * kSectionKeys;
    const int64_t seen = std::min(kSectionKeys, position + kRows - begin);
    const int64_t width = (seen + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes);
    for (int64_t key = 0; key < width; key += 2 * kLanes) {
      Floats sums[kRows][2] = {};
      const BFloat16* panel = keys + key * kHeadDim;
      Ahead nothing{};
      sum_pairs<Format::kBFloat16, kRows>(queries, stride,
                                          panels_at(panel, panel + kLanes * kHeadDim), nothing,
                                          kHeadDim, sums);
      for (int r = 0; r < kRows; ++r) {
        store(scratch.scores[r] + key, sums[r][0]);
        store(scratch.scores[r] + key + kLanes, sums[r][1]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      weigh_row(scratch, r, first_seen(position + r) - begin, position + r + 1 - begin, width,
                scale);
    }
    for (int64_t d = 0; d < kHeadDim; d += 2 * kLanes) {
      Floats sums[kRows][2];
      for (int r = 0; r < kRows; ++r) {
        sums[r][0] = load(scratch.totals[r] + d);
        sums[r][1] = load(scratch.totals[r] + d + kLanes);
      }
      const BFloat16* panel = values + d * kSectionKeys;
      Ahead nothing{};
      sum_pairs<Format::kBFloat16, kRows>(scratch.weights[0], kSectionKeys,
                                          panels_at(panel, panel + kLanes * kSectionKeys), nothing,
                                          width, sums);
      for (int r = 0; r < kRows; ++r) {
        store(scratch.totals[r] + d, sums[r][0]);
        store(scratch.totals[r] + d + kLanes, sums[r][1]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int64_t d = 0; d < kHeadDim; d += kLanes) {
      store(out + r * out_stride + d, load(scratch.totals[r] + d) * (1.0f / scratch.sums[r]));
    }
  }
}

}  // namespace
