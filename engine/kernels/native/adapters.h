// LoRA adapters' products: adds B (A x) to each row, by the row's own adapter. Hu et al., "LoRA:
// Low-Rank Adaptation of Large Language Models" (arXiv:2106.09685). Rows of different adapters are
// computed together as in Chen et al., "Punica" (arXiv:2310.18547).
//
// A row's ranks (A x) are computed before the product, which then adds B times them to its sums
// before it finishes them. So a row without an adapter is computed as in a batch without adapters,
// and a row with an adapter is the same in any batch.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "lanes.h"
#include "weights.h"

namespace {

// Slice of the outputs of one matrix of the checkpoint, such as the queries. B [num_outputs,
// num_ranks] is in panels of 16 outputs, in which each pair of ranks is a vector; it includes the
// scale. `first_rank` is the slice's first rank among all ranks of the product.
struct AdapterSlice {
  const BFloat16* b;
  int64_t num_ranks, first_rank;
};

constexpr size_t kAdapterSlices = 3;

// Adapter of one product. A [num_ranks, num_inputs] is in panels of 16 ranks, in which each pair of
// inputs is a vector, or null if the adapter has no matrix here. Ranks are padded with zeros: those
// of a slice to a multiple of 4, those of the product to a multiple of 16.
struct AdapterWeight {
  const BFloat16* a;
  int64_t num_ranks;
  AdapterSlice slices[kAdapterSlices];
};

// One layer of one adapter.
struct AdapterLayer {
  AdapterWeight qkv, output, gate_up, down;
};

// Adapters of a step: `layers` of each, and each row's adapter, -1 for none.
struct StepAdapters {
  const AdapterLayer* const* layers;
  int64_t count;
  const int32_t* of_rows;
};

// Rows of one product with adapters. `ranks` [num_rows, stride] holds A x. `ends` has the end of
// each slice's outputs.
struct AdaptedRows {
  const StepAdapters* step;
  int64_t layer;
  AdapterWeight AdapterLayer::*product;
  BFloat16* ranks;
  int64_t stride;
  std::array<int64_t, kAdapterSlices> ends;

  // True if any adapter of the step adds to the product.
  bool any() const {
    return std::any_of(step->layers, step->layers + step->count, [&](const AdapterLayer* layers) {
      return (layers[layer].*product).a != nullptr;
    });
  }

  // Null for a row without an adapter here.
  const AdapterWeight* weight_of(int64_t row) const {
    const int32_t adapter = step->of_rows[row];
    if (adapter < 0) return nullptr;
    const AdapterWeight* weight = &(step->layers[adapter][layer].*product);
    return weight->a == nullptr ? nullptr : weight;
  }

  // Slice of an output and the slice's first output; no slice past the last.
  struct Place {
    size_t slice;
    int64_t begin;
  };
  Place place_of(int64_t output) const {
    Place place{0, 0};
    while (place.slice < kAdapterSlices && output >= ends[place.slice]) {
      place.begin = ends[place.slice++];
    }
    return place;
  }

  // Adds the adapters' products for 16 outputs to the `sums` of kRows rows from `row` on.
  template <int kRows>
  void add(int64_t row, int64_t output, Floats (&sums)[kRows][2], int v) const {
    const Place place = place_of(output);
    if (place.slice == kAdapterSlices) return;
    const int32_t* adapters = step->of_rows + row;
    for (int r = 0; r < kRows;) {
      const AdapterWeight* weight = weight_of(row + r);
      int count = 1;
      while (r + count < kRows && count < kTogether && adapters[r + count] == adapters[r]) ++count;
      if (weight != nullptr) {
        const AdapterSlice& own = weight->slices[place.slice];
        const BFloat16* b = own.b + (output - place.begin) * own.num_ranks;
        const BFloat16* inputs = ranks + (row + r) * stride + own.first_rank;
        if (count == kTogether) {
          add_to<kTogether>(b, inputs, own.num_ranks, &sums[r][v]);
        } else {
          count = 1;
          add_to<1>(b, inputs, own.num_ranks, &sums[r][v]);
        }
      }
      r += count;
    }
  }

  // Prefetches what `add` reads for 16 outputs.
  void ask_for(int64_t row, int64_t output) const {
    const Place place = place_of(output);
    const AdapterWeight* weight = weight_of(row);
    if (weight == nullptr || place.slice == kAdapterSlices) return;
    const AdapterSlice& own = weight->slices[place.slice];
    const auto* from = reinterpret_cast<const std::byte*>(own.b + (output - place.begin) * own.num_ranks);
    for (int64_t line = 0; line < own.num_ranks / 2; ++line, from += kLineBytes) {
      __builtin_prefetch(from, 0, 2);
    }
  }

 private:
  // Rows of one adapter that are computed together.
  static constexpr int kTogether = 4;

  // The `sums` of neighbouring rows are two vectors apart.
  template <int kRows>
  void add_to(const BFloat16* b, const BFloat16* inputs, int64_t num_ranks, Floats* sums) const {
    // Two sums, because each addition waits for the previous one.
    Floats even[kRows]{}, odd[kRows]{};
    for (int64_t rank = 0; rank < num_ranks; rank += 4, b += 4 * kPanelOutputs) {
      const Pairs first = load_pairs(b), second = load_pairs(b + 2 * kPanelOutputs);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        even[r] = plus_products(even[r], first, twice_each(inputs + r * stride + rank));
        odd[r] = plus_products(odd[r], second, twice_each(inputs + r * stride + rank + 2));
      }
    }
    for (int r = 0; r < kRows; ++r) sums[2 * r] += even[r] + odd[r];
  }
};

// Rows `row` ... `row + count - 1`, all of one adapter, and the number of a panel of its ranks.
struct RankItem {
  int64_t row, count, panel;
};

// Most rows whose ranks are computed at a time.
constexpr int kRankRows = 4;
// Distance at which a sum prefetches A, which is contiguous.
constexpr int64_t kAheadElements = 2048;

// Items of work to compute the ranks of a step's rows, shared among threads.
class RankItems {
 public:
  // `most_ranks` is the largest number of ranks of a product.
  RankItems(const StepAdapters& step, int64_t num_rows, int64_t most_ranks) {
    for (int64_t row = 0; row < num_rows;) {
      const int32_t adapter = step.of_rows[row];
      int64_t end = row + 1;
      while (end < num_rows && end < row + kRankRows && step.of_rows[end] == adapter) ++end;
      for (int64_t panel = 0; adapter >= 0 && panel < most_ranks / kLanes; ++panel) {
        items_.push_back({row, end - row, panel});
      }
      row = end;
    }
  }

  int64_t count() const { return static_cast<int64_t>(items_.size()); }

  // Computes the item's ranks of `rows` [num_rows, num_inputs], if its adapter has this panel.
  void compute(int64_t at, const AdaptedRows& adapted, const BFloat16* rows,
               int64_t num_inputs) const {
    const RankItem& item = items_[static_cast<size_t>(at)];
    const AdapterWeight* weight = adapted.weight_of(item.row);
    const int64_t rank = item.panel * kLanes;
    if (weight == nullptr || rank >= weight->num_ranks) return;
    const BFloat16* a = weight->a + rank * num_inputs;
    const BFloat16* inputs = rows + item.row * num_inputs;
    BFloat16* ranks = adapted.ranks + item.row * adapted.stride + rank;
    switch (item.count) {
      case 1:
        return multiply<1>(a, inputs, num_inputs, ranks, adapted.stride);
      case 2:
        return multiply<2>(a, inputs, num_inputs, ranks, adapted.stride);
      case 3:
        return multiply<3>(a, inputs, num_inputs, ranks, adapted.stride);
      default:
        return multiply<kRankRows>(a, inputs, num_inputs, ranks, adapted.stride);
    }
  }

 private:
  template <int kRows>
  static void multiply(const BFloat16* a, const BFloat16* rows, int64_t num_inputs,
                       BFloat16* ranks, int64_t stride) {
    constexpr int kPairs = kUnrolled / 2;
    // One sum for each place in the loop, because each addition waits for the previous one.
    Floats sums[kRows][kPairs] = {};
    for (int64_t i = 0; i < num_inputs; i += kUnrolled, a += kUnrolled * kLanes) {
#pragma GCC unroll 4
      for (int k = 0; k < kPairs; ++k) {
        __builtin_prefetch(a + 2 * k * kLanes + kAheadElements, 0, 2);
        const Pairs pairs = load_pairs(a + 2 * k * kLanes);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          const Pairs inputs = twice_each(rows + r * num_inputs + i + 2 * k);
          sums[r][k] = plus_products(sums[r][k], pairs, inputs);
        }
      }
    }
    for (int r = 0; r < kRows; ++r) {
      store(ranks + r * stride, (sums[r][0] + sums[r][1]) + (sums[r][2] + sums[r][3]));
    }
  }

  std::vector<RankItem> items_;
};

}  // namespace
