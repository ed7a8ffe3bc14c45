// Products of bfloat16 rows with weights of any format of weights.h.
//
// Sums go over the inputs from first to last, in float32 within a group, or in integers, for any
// number of rows and threads. So products are batch-invariant: a row's result is the same in any
// batch.

#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include <omp.h>

#include "adapters.h"
#include "elementwise.h"
#include "group_dot.h"
#include "lanes.h"
#include "weights.h"

namespace {

// Rows whose sums fit the registers together with two vectors of weights and one of inputs.
#ifdef __AVX512F__
constexpr int kTileRows = 12;
#else
constexpr int kTileRows = 4;
#endif

// Last step of a product: write, add to the output, or combine by silu(gate) * up.
enum class Finish { kWrite, kAdd, kGate };

// Arguments of a product. `rows` [num_rows, num_inputs] are bfloat16, or made by `prepare_row` if
// the weight needs that, with `scales` [num_rows, num_scales], and for a weight with zeros the
// `sums` of their groups [num_rows, num_groups]. For formats of groups, `rows` are int16
// [num_inputs / 32, num_rows, 32] with `scales` [num_inputs / 32, num_rows], `sums` and `starts`
// [num_groups, num_rows], see `prepare_group_row`. `out` is [num_rows, num_outputs], or half as wide
// for kGate, whose panels are the gates, then the ups. `adapted` is null if no row has an adapter.
// `partial` [num_rows, num_outputs], if not null, gets the unfinished sums in place of `out`.
struct Product {
  const void* rows;
  const Weight* weight;
  BFloat16* out;
  int64_t num_rows, num_inputs, num_outputs;
  Finish finish;
  const float* scales = nullptr;
  const float* sums = nullptr;
  const int32_t* starts = nullptr;
  const AdaptedRows* adapted = nullptr;
  float* partial = nullptr;

  int64_t row_bytes() const {
    return weight->format == Format::kInt8Dot ? num_inputs : 2 * num_inputs;
  }
  int64_t num_groups() const { return num_inputs / weight->group_inputs; }
  int64_t num_scales() const {
    return weight->activation == Activation::kFloat8Groups ? num_groups() : 1;
  }
  int64_t panel_bytes() const { return octet_bytes(weight->format) * num_inputs / kUnrolled; }
};

// Items that threads share: two panels each, and with many rows a part of the rows.
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

struct Panels {
  const std::byte *first, *second;
};

inline Panels panels_at(const BFloat16* first, const BFloat16* second) {
  return {reinterpret_cast<const std::byte*>(first), reinterpret_cast<const std::byte*>(second)};
}

// Prefetch of a tile while it computes: a number of lines of both panels per turn.
struct Ahead {
  Panels panels;
  int64_t lines;
};

// Prefetches lines of both panels and advances `ahead` past them.
inline void ask(Ahead& ahead) {
  for (int64_t line = 0; line < ahead.lines; ++line) {
    __builtin_prefetch(ahead.panels.first, 0, 2);
    __builtin_prefetch(ahead.panels.second, 0, 2);
    ahead.panels.first += kLineBytes;
    ahead.panels.second += kLineBytes;
  }
}

// Adds to `sums` the products of kRows rows, `stride` apart, with two panels.
template <Format kFormat, int kRows>
__attribute__((always_inline)) inline void sum_pairs(const BFloat16* rows, int64_t stride,
                                                     const Panels& panels, Ahead& ahead,
                                                     int64_t num_inputs,
                                                     Floats (&sums)[kRows][2]) {
  constexpr int64_t kStride = octet_bytes(kFormat);
  Floats totals[kRows][2];
  std::memcpy(totals, sums, sizeof totals);
  const std::byte *first = panels.first, *second = panels.second;
  for (int64_t at = 0; at < num_inputs; at += kUnrolled, first += kStride, second += kStride) {
    ask(ahead);
    const Octet<kFormat> weights(first), more(second);
#pragma GCC unroll 4
    for (int k = 0; k < kUnrolled / 2; ++k) {
      const Pairs pair = weights.pair(k), other = more.pair(k);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const Pairs inputs = twice_each(rows + r * stride + at + 2 * k);
        totals[r][0] = plus_products(totals[r][0], pair, inputs);
        totals[r][1] = plus_products(totals[r][1], other, inputs);
      }
    }
  }
  std::memcpy(sums, totals, sizeof totals);
}

// Like `sum_pairs`, for rows of bytes; overwrites the sums, which are integers.
template <int kRows>
__attribute__((always_inline)) inline void sum_bytes(const uint8_t* rows, int64_t stride,
                                                     Panels panels, Ahead& ahead,
                                                     int64_t num_inputs, Ints (&sums)[kRows][2]) {
  Ints totals[kRows][2] = {};
  const std::byte *first = panels.first, *second = panels.second;
  for (int64_t at = 0; at < num_inputs; at += kUnrolled) {
    ask(ahead);
#pragma GCC unroll 2
    for (int k = 0; k < kUnrolled; k += 4, first += kLineBytes, second += kLineBytes) {
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const uint8_t* inputs = rows + r * stride + at + k;
        totals[r][0] = plus_byte_products(totals[r][0], first, inputs);
        totals[r][1] = plus_byte_products(totals[r][1], second, inputs);
      }
    }
  }
  std::memcpy(sums, totals, sizeof totals);
}

// Scaled products of kRows rows from `row` on with `panels`, which belong to `outputs`.
template <Format kFormat, int kRows>
__attribute__((always_inline)) inline void sum_tile(const Product& product, int64_t row,
                                                    const int64_t (&outputs)[2], Panels panels,
                                                    Ahead ahead, Floats (&sums)[kRows][2]) {
  const Weight& weight = *product.weight;
  const int64_t stride = product.num_inputs;
  const auto panel = [&](int v) { return outputs[v] / kPanelOutputs; };
  const float* row_scales = product.scales + row * product.num_scales();
  if constexpr (kFormat == Format::kInt8Dot) {
    Ints dots[kRows][2];
    sum_bytes<kRows>(static_cast<const uint8_t*>(product.rows) + row * stride, stride, panels,
                     ahead, product.num_inputs, dots);
    for (int v = 0; v < 2; ++v) {
      const Floats scale = load(static_cast<const float*>(weight.scales) + panel(v) * kLanes);
      const auto* offsets = static_cast<const int32_t*>(weight.offsets) + panel(v) * kLanes;
      for (int r = 0; r < kRows; ++r) {
        const Ints dot = dots[r][v] - unaligned<Ints>(offsets);
        sums[r][v] = __builtin_convertvector(dot, Floats) * (scale * row_scales[r]);
      }
    }
  } else if constexpr (has_groups(kFormat)) {
    const GroupRows rows{static_cast<const int16_t*>(product.rows) + row * kBlockInputs,
                         product.scales + row, product.sums + row, product.starts + row,
                         product.num_rows};
    sum_groups<kFormat, kRows>(weight, rows, product.num_inputs, {panels.first, panels.second},
                               {panel(0), panel(1)}, [&] { ask(ahead); }, sums);
  } else if constexpr (kFormat == Format::kBFloat16) {
    const BFloat16* rows = static_cast<const BFloat16*>(product.rows) + row * stride;
    sum_pairs<kFormat, kRows>(rows, stride, panels, ahead, product.num_inputs, sums);
  } else {
    const BFloat16* rows = static_cast<const BFloat16*>(product.rows) + row * stride;
    const int64_t num_groups = product.num_groups(), num_scales = product.num_scales();
    const int64_t group_bytes = octet_bytes(kFormat) * weight.group_inputs / kUnrolled;
    for (int64_t group = 0; group < num_groups; ++group, rows += weight.group_inputs) {
      Floats dots[kRows][2] = {};
      sum_pairs<kFormat, kRows>(rows, stride, panels, ahead, weight.group_inputs, dots);
      panels.first += group_bytes;
      panels.second += group_bytes;
      for (int v = 0; v < 2; ++v) {
        const int64_t at = (panel(v) * num_groups + group) * kLanes;
        const Floats scale = load(static_cast<const float*>(weight.scales) + at);
        for (int r = 0; r < kRows; ++r) {
          Floats part = dots[r][v] * scale;
          if (weight.offsets != nullptr) {
            part -= load(static_cast<const float*>(weight.offsets) + at) *
                    product.sums[(row + r) * num_groups + group];
          }
          if (product.scales != nullptr) {
            part *= row_scales[r * num_scales + (num_scales > 1 ? group : 0)];
          }
          sums[r][v] += part;
        }
      }
    }
  }
}

inline bool is_gate(const Product& product) { return product.finish == Finish::kGate; }

// First output of each panel of the item `two`.
inline int64_t first_output(const Product& product, int64_t two, int panel) {
  return is_gate(product) ? product.num_outputs / 2 * panel + two * kLanes
                          : (2 * two + panel) * kLanes;
}

// Computes rows `row` ... `row + kRows - 1` of the item `two`, with panels in kFormat, which may
// differ from the weight's.
template <Format kFormat, int kRows>
void multiply_tile(const Product& product, int64_t two, int64_t row, const Panels& panels,
                   const Ahead& ahead) {
  const bool gate = is_gate(product);
  const BFloat16* biases = product.weight->bias;
  const int64_t half = product.num_outputs / 2;
  const int64_t outputs[2] = {first_output(product, two, 0), first_output(product, two, 1)};
  Floats sums[kRows][2] = {};
  sum_tile<kFormat, kRows>(product, row, outputs, panels, ahead, sums);
  if (product.adapted != nullptr) {
    for (int v = 0; v < 2; ++v) product.adapted->add<kRows>(row, outputs[v], sums, v);
  }
  const int64_t width = gate ? half : product.num_outputs;
  for (int v = 0; v < 2 && biases != nullptr; ++v) {
    const Floats bias = load_some(biases + outputs[v], product.num_outputs - outputs[v]);
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
      if (product.partial != nullptr) {
        store_some(product.partial + (row + r) * width + outputs[v], sums[r][v], left);
        continue;
      }
      if (product.finish == Finish::kAdd) sums[r][v] += load_some(out + outputs[v], left);
      store_some(out + outputs[v], sums[r][v], left);
    }
  }
}

using MultiplyTile = void (*)(const Product&, int64_t, int64_t, const Panels&, const Ahead&);
// Functions by the number of rows minus one.
template <Format kFormat, int... kRowsLessOne>
constexpr auto multiply_tiles(std::integer_sequence<int, kRowsLessOne...>) {
  return std::array<MultiplyTile, kTileRows>{multiply_tile<kFormat, kRowsLessOne + 1>...};
}
template <Format kFormat>
constexpr auto kTilesOf =
    multiply_tiles<kFormat>(std::make_integer_sequence<int, kTileRows>{});
// Functions by format.
constexpr std::array kMultiplyTile{kTilesOf<Format::kBFloat16>, kTilesOf<Format::kInt8>,
                                   kTilesOf<Format::kFloat8>, kTilesOf<Format::kInt4>,
                                   kTilesOf<Format::kInt8Dot>, kTilesOf<Format::kCodes>,
                                   kTilesOf<Format::kGroup4>,  kTilesOf<Format::kGroup5>,
                                   kTilesOf<Format::kGroup6>,  kTilesOf<Format::kGroup8>,
                                   kTilesOf<Format::kGroupCodes>};

// Converts a panel of codes to bfloat16.
template <Format kFormat>
void widen_panel(const std::byte* from, int64_t num_inputs, std::byte* to) {
  for (int64_t at = 0; at < num_inputs; at += kUnrolled, from += octet_bytes(kFormat)) {
    const Octet<kFormat> weights(from);
#pragma GCC unroll 4
    for (int k = 0; k < kUnrolled / 2; ++k, to += kLineBytes) store_pairs(to, weights.pair(k));
  }
}

// Functions by format; null where widening gains nothing.
constexpr std::array<void (*)(const std::byte*, int64_t, std::byte*), kMultiplyTile.size()>
    kWidenPanel{nullptr,
                widen_panel<Format::kInt8>,
                widen_panel<Format::kFloat8>,
                widen_panel<Format::kInt4>,
                nullptr,
                nullptr,
                widen_groups<Format::kGroup4>,
                widen_groups<Format::kGroup5>,
                widen_groups<Format::kGroup6>,
                widen_groups<Format::kGroup8>,
                nullptr};

// `next` is this thread's next item, or `item` itself. Each of the first tiles prefetches a part of
// its panels, so that no thread waits for memory between two items.
inline void multiply_item(const Product& product, const Items& items, int64_t item, int64_t next) {
  const int64_t two = item / items.num_parts, part = item % items.num_parts;
  const int64_t begin = product.num_rows * part / items.num_parts;
  const int64_t count = product.num_rows * (part + 1) / items.num_parts - begin;
  // Tiles have about equal heights: tiles of 12 rows and 1 row would waste most of the latter.
  const int64_t num_tiles = (count + kTileRows - 1) / kTileRows;
  const auto soon = [&](int panel) {
    const int64_t output = first_output(product, next / items.num_parts, panel);
    return product.weight->codes + output / kPanelOutputs * product.panel_bytes();
  };
  auto format = static_cast<size_t>(product.weight->format);
  const auto codes = [&](int panel) {
    return product.weight->codes +
           first_output(product, two, panel) / kPanelOutputs * product.panel_bytes();
  };
  Panels panels{codes(0), codes(1)};
  // Several tiles share panels that are widened once.
  if (num_tiles > 1 && kWidenPanel[format] != nullptr) {
    thread_local std::vector<std::byte> widened;
    const int64_t size = octet_bytes(Format::kCodes) * product.num_inputs / kUnrolled;
    widened.resize(static_cast<size_t>(2 * size));
    kWidenPanel[format](panels.first, product.num_inputs, widened.data());
    kWidenPanel[format](panels.second, product.num_inputs, widened.data() + size);
    panels = {widened.data(), widened.data() + size};
    format = static_cast<size_t>(has_groups(product.weight->format) ? Format::kGroupCodes
                                                                    : Format::kCodes);
  }
  const auto& tiles = kMultiplyTile[format];
  const int64_t turn = turn_inputs(product.weight->format);
  const int64_t lines_around =
      octet_bytes(product.weight->format) * turn / kUnrolled / kLineBytes;
  const int64_t lines =
      next / items.num_parts == two ? 0 : (lines_around + num_tiles - 1) / num_tiles;
  for (int64_t tile = 0, row = 0; tile < num_tiles; ++tile) {
    const int64_t end = count * (tile + 1) / num_tiles;
    const int64_t from = tile * lines * product.num_inputs / turn * kLineBytes;
    const bool fetches = tile * lines < lines_around;
    if (product.adapted != nullptr && next / items.num_parts != two) {
      for (int64_t r = begin + row; r < begin + end; ++r) {
        for (int panel = 0; panel < 2; ++panel) {
          product.adapted->ask_for(r, first_output(product, next / items.num_parts, panel));
        }
      }
    }
    const Ahead ahead{{soon(0) + from, soon(1) + from}, fetches ? lines : 0};
    tiles[static_cast<size_t>(end - row - 1)](product, two, begin + row, panels, ahead);
    row = end;
  }
}

// Takes items until none is left, several threads at once; a delayed thread leaves more to the
// others. `use` gets an item and this thread's next one, or the same item again.
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

// Rows prepared for a product, if the weight needs it.
class PreparedRows {
 public:
  // For products whose rows have at most `num_inputs` inputs in total.
  explicit PreparedRows(int64_t num_inputs)
      : codes_(elements<BFloat16>(num_inputs)),
        scales_(elements<float>(num_inputs / kLanes + 1)),
        sums_(elements<float>(num_inputs / kLanes + 1)),
        starts_(elements<int32_t>(num_inputs / kLanes + 1)) {}

  void prepare(const Product& product, int64_t row) {
    thread_local std::vector<BFloat16> scratch;
    scratch.resize(static_cast<size_t>(product.num_inputs));
    const auto* from = static_cast<const BFloat16*>(product.rows) + row * product.num_inputs;
    if (has_groups(product.weight->format)) {
      prepare_group_row(*product.weight, from, product.num_inputs, product.num_rows,
                        scratch.data(),
                        reinterpret_cast<int16_t*>(codes_.get()) + row * kBlockInputs,
                        scales_.get() + row, sums_.get() + row, starts_.get() + row);
      return;
    }
    prepare_row(*product.weight, from, product.num_inputs, scratch.data(),
                reinterpret_cast<std::byte*>(codes_.get()) + row * product.row_bytes(),
                scales_.get() + row * product.num_scales(),
                sums_.get() + row * product.num_groups());
  }

  Product of(Product product) const {
    product.rows = codes_.get();
    product.scales = scales_.get();
    product.sums = sums_.get();
    product.starts = starts_.get();
    return product;
  }

 private:
  template <typename T>
  static std::unique_ptr<T[]> elements(int64_t count) {
    return std::make_unique_for_overwrite<T[]>(static_cast<size_t>(count));
  }

  std::unique_ptr<BFloat16[]> codes_;
  std::unique_ptr<float[]> scales_, sums_;
  std::unique_ptr<int32_t[]> starts_;
};

inline void multiply(Product product) {
  std::atomic<int64_t> next{0};
  const bool prepares = product.weight->prepares();
  PreparedRows prepared(prepares ? product.num_rows * product.num_inputs : 0);
#pragma omp parallel firstprivate(product)
  {
    if (prepares) {
#pragma omp for
      for (int64_t row = 0; row < product.num_rows; ++row) prepared.prepare(product, row);
      product = prepared.of(product);
    }
    const int num_threads = omp_get_num_threads();
    const Items items = items_of(product, num_threads);
    share_items(next, items.count(), num_threads, [&](int64_t item, int64_t following) {
      multiply_item(product, items, item, following);
    });
  }
}

}  // namespace
