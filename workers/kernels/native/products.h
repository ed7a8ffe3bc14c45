// Products of bfloat16 rows with weights that are packed for dot products of pairs, by the CPU's own
// instruction for these where it has one.
//
// A panel is 16 outputs of a weight matrix [num_outputs, num_inputs]: pair by pair of inputs the 16
// outputs side by side, so that one vector has two inputs of each, and a product reads its panels
// from first to last. Panels come in twos; outputs that are not there are zeros. Each sum is taken
// over the inputs from first to last in float32, whatever the number of rows and threads: a row's
// result is the same in every company.

#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <utility>

#include <omp.h>

#include "elementwise.h"
#include "lanes.h"

namespace {

constexpr int64_t kPanelOutputs = kLanes;
// Rows whose sums fit the registers beside two vectors of weights and one of inputs.
#ifdef __AVX512F__
constexpr int kTileRows = 12;
#else
constexpr int kTileRows = 4;
#endif

// What becomes of the sums: written, added to what is there, or made one by silu(gate) * up.
enum class Finish { kWrite, kAdd, kGate };

// `rows` [num_rows, num_inputs], `out` [num_rows, num_outputs], or half of that for kGate, whose
// panels are the gates, then what they gate. `bias` [num_outputs] may be null.
struct Product {
  const BFloat16* rows;
  const BFloat16* panels;
  const BFloat16* bias;
  BFloat16* out;
  int64_t num_rows, num_inputs, num_outputs;
  Finish finish;
};

// Items that threads share: two panels each, and of many rows a part of them.
struct Items {
  int64_t num_twos, num_parts;
  int64_t count() const { return num_twos * num_parts; }
};

inline Items items_of(const Product& product, int num_threads) {
  constexpr int64_t kItemsPerThread = 4;
  const int64_t twice = 2 * kPanelOutputs;
  if (product.num_rows == 0) return {0, 1};
  Items items{(product.num_outputs + twice - 1) / twice, 1};
  while (items.count() < kItemsPerThread * num_threads &&
         product.num_rows >= 4 * kTileRows * items.num_parts) {
    items.num_parts *= 2;
  }
  return items;
}

// Inputs that the loop of a tile takes at a time: widths are multiples of it.
constexpr int kUnrolled = 8;

struct Panels {
  const BFloat16 *first, *second;
};

// What a tile asks memory for while it computes: so many lines of both panels for each time around.
struct Ahead {
  Panels panels;
  int lines;
};

#ifdef __AVX512BF16__
using Pairs = __m512bh;
inline Pairs load_pairs(const BFloat16* from) { return (Pairs)_mm512_loadu_si512(from); }
inline Pairs twice_each(const BFloat16* from) {
  return (Pairs)_mm512_set1_epi32(unaligned<int32_t>(from));
}
inline Floats plus_products(Floats sums, Pairs weights, Pairs inputs) {
  return (Floats)_mm512_dpbf16_ps((__m512)sums, weights, inputs);
}
#else
// Of each pair its first and its second element.
struct Pairs {
  Floats even, odd;
};
inline Pairs load_pairs(const BFloat16* from) {
  Pairs pairs;
  load_pair(from, pairs.even, pairs.odd);
  return pairs;
}
inline Pairs twice_each(const BFloat16* from) {
  const auto word = unaligned<uint32_t>(from);
  return {(Floats)(Words{} + (word << 16)), (Floats)(Words{} + (word & 0xffff0000u))};
}
inline Floats plus_products(Floats sums, const Pairs& weights, const Pairs& inputs) {
  return sums + weights.even * inputs.even + weights.odd * inputs.odd;
}
#endif

// Adds to `sums` the products of kRows rows, `stride` apart, with two panels.
template <int kRows>
__attribute__((always_inline)) inline void sum_tile(const BFloat16* rows, int64_t stride,
                                                    const Panels& panels, const Ahead& ahead,
                                                    int64_t num_inputs, Floats (&sums)[kRows][2]) {
  Floats totals[kRows][2];
  std::memcpy(totals, sums, sizeof totals);
  const BFloat16 *first = panels.first, *second = panels.second;
  const BFloat16 *next = ahead.panels.first, *next_second = ahead.panels.second;
  for (int64_t at = 0; at < num_inputs; at += kUnrolled) {
    for (int line = 0; line < ahead.lines; ++line, next += 2 * kLanes, next_second += 2 * kLanes) {
      __builtin_prefetch(next, 0, 2);
      __builtin_prefetch(next_second, 0, 2);
    }
#pragma GCC unroll 4
    for (int64_t i = 0; i < kUnrolled; i += 2, first += 2 * kLanes, second += 2 * kLanes) {
      const Pairs weights = load_pairs(first), more = load_pairs(second);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const Pairs inputs = twice_each(rows + r * stride + at + i);
        totals[r][0] = plus_products(totals[r][0], weights, inputs);
        totals[r][1] = plus_products(totals[r][1], more, inputs);
      }
    }
  }
  std::memcpy(sums, totals, sizeof totals);
}

// Up to 16 elements of which `count` are there.
inline Floats load_some(const BFloat16* from, int64_t count) {
  if (count >= kLanes) return load(from);
  BFloat16 all[kLanes] = {};
  if (count > 0) std::memcpy(all, from, static_cast<size_t>(count) * sizeof *from);
  return load(all);
}

inline void store_some(BFloat16* to, Floats values, int64_t count) {
  if (count >= kLanes) return store(to, values);
  BFloat16 all[kLanes];
  store(all, values);
  if (count > 0) std::memcpy(to, all, static_cast<size_t>(count) * sizeof *to);
}

inline bool is_gate(const Product& product) { return product.finish == Finish::kGate; }

// The first output of each panel of the item `two`.
inline int64_t first_output(const Product& product, int64_t two, int panel) {
  return is_gate(product) ? product.num_outputs / 2 * panel + two * kLanes
                          : (2 * two + panel) * kLanes;
}

inline Panels panels_of(const Product& product, int64_t two) {
  const auto at = [&](int panel) {
    return product.panels + first_output(product, two, panel) * product.num_inputs;
  };
  return {at(0), at(1)};
}

// Rows `row` ... `row + kRows - 1` of the item `two`.
template <int kRows>
void multiply_tile(const Product& product, int64_t two, int64_t row, const Ahead& ahead) {
  const bool gate = is_gate(product);
  const int64_t half = product.num_outputs / 2;
  const int64_t outputs[2] = {first_output(product, two, 0), first_output(product, two, 1)};
  Floats sums[kRows][2] = {};
  sum_tile<kRows>(product.rows + row * product.num_inputs, product.num_inputs,
                  panels_of(product, two), ahead, product.num_inputs, sums);
  const int64_t width = gate ? half : product.num_outputs;
  for (int v = 0; v < 2 && product.bias != nullptr; ++v) {
    const Floats bias = load_some(product.bias + outputs[v], product.num_outputs - outputs[v]);
    for (int r = 0; r < kRows; ++r) sums[r][v] += bias;
  }
  for (int r = 0; r < kRows; ++r) {
    BFloat16* out = product.out + (row + r) * width;
    if (gate) {
      store(out + outputs[0], gated(sums[r][0], sums[r][1]));
      continue;
    }
    for (int v = 0; v < 2; ++v) {
      const int64_t left = width - outputs[v];
      if (product.finish == Finish::kAdd) sums[r][v] += load_some(out + outputs[v], left);
      store_some(out + outputs[v], sums[r][v], left);
    }
  }
}

using MultiplyTile = void (*)(const Product&, int64_t, int64_t, const Ahead&);
// By the number of rows less one.
template <int... kRowsLessOne>
constexpr auto multiply_tiles(std::integer_sequence<int, kRowsLessOne...>) {
  return std::array<MultiplyTile, kTileRows>{multiply_tile<kRowsLessOne + 1>...};
}
constexpr auto kMultiplyTile = multiply_tiles(std::make_integer_sequence<int, kTileRows>{});

// `next` is the item that this thread takes afterwards, or itself: its panels are fetched meanwhile,
// a part of them by each of the first tiles, so that memory is never waited for between two items.
inline void multiply_item(const Product& product, const Items& items, int64_t item, int64_t next) {
  const int64_t two = item / items.num_parts, part = item % items.num_parts;
  const int64_t begin = product.num_rows * part / items.num_parts;
  const int64_t count = product.num_rows * (part + 1) / items.num_parts - begin;
  // Tiles of about the same height: one of 12 rows and one of 1 would waste most of the latter.
  const int64_t num_tiles = (count + kTileRows - 1) / kTileRows;
  const Panels soon = panels_of(product, next / items.num_parts);
  constexpr int64_t kLinesAround = kUnrolled / 2;
  const int64_t lines = next / items.num_parts == two ? 0 : (kLinesAround + num_tiles - 1) / num_tiles;
  for (int64_t tile = 0, row = 0; tile < num_tiles; ++tile) {
    const int64_t end = count * (tile + 1) / num_tiles;
    const int64_t from = tile * lines * product.num_inputs / kUnrolled * 2 * kLanes;
    const bool fetches = tile * lines < kLinesAround;
    const Ahead ahead{{soon.first + from, soon.second + from}, fetches ? static_cast<int>(lines) : 0};
    kMultiplyTile[static_cast<size_t>(end - row - 1)](product, two, begin + row, ahead);
    row = end;
  }
}

// Takes items until none is left, some at once. A thread that is held up elsewhere leaves more to
// the others. `use` gets an item and the one that follows it for this thread, or the same again.
template <typename Use>
inline void share_items(std::atomic<int64_t>& next, int64_t count, int num_threads, Use&& use) {
  constexpr int64_t kTurnsPerThread = 8;
  const int64_t at_once = std::max<int64_t>(1, count / (kTurnsPerThread * num_threads));
  int64_t begin = next.fetch_add(at_once, std::memory_order_relaxed);
  while (begin < count) {
    const int64_t end = std::min(begin + at_once, count);
    const int64_t following = next.fetch_add(at_once, std::memory_order_relaxed);
    for (int64_t item = begin; item < end; ++item) {
      use(item, item + 1 < end ? item + 1 : following < count ? following : item);
    }
    begin = following;
  }
}

inline void multiply(const Product& product) {
  std::atomic<int64_t> next{0};
#pragma omp parallel
  {
    const int num_threads = omp_get_num_threads();
    const Items items = items_of(product, num_threads);
    share_items(next, items.count(), num_threads, [&](int64_t item, int64_t following) {
      multiply_item(product, items, item, following);
    });
  }
}

}  // namespace
