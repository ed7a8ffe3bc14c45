// What LoRA adapters add to products: B (A x) for each row, by the adapter of its own. Hu et al.,
// "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv:2106.09685); rows of any adapters go
// together as in Chen et al., "Punica" (arXiv:2310.18547).
//
// A row's ranks (A x) are computed before the product, which then adds B times them to its own sums
// before anything becomes of these: so a row without an adapter is computed as ever, and one with an
// adapter the same in every company.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "lanes.h"
#include "weights.h"

namespace {

// Of the outputs that belong to one matrix of the checkpoint, such as the queries: B [num_outputs,
// num_ranks] as panels of 16 outputs, of which each pair of ranks is a vector; the scale is in it.
// `first_rank` is where its ranks begin among all of the product's.
struct AdapterSlice {
  const BFloat16* b;
  int64_t num_ranks, first_rank;
};

constexpr size_t kAdapterSlices = 3;

// Of one product: A [num_ranks, num_inputs], null if the adapter has nothing there. Ranks are
// multiples of 8, those that are not there are zeros.
struct AdapterWeight {
  const BFloat16* a;
  int64_t num_ranks;
  AdapterSlice slices[kAdapterSlices];
};

// Of one layer of one adapter.
struct AdapterLayer {
  AdapterWeight qkv, output, gate_up, down;
};

// The adapters of a step: `layers` of each, and which one each row has, -1 for none.
struct StepAdapters {
  const AdapterLayer* const* layers;
  int64_t count;
  const int32_t* of_rows;
};

// Rows of one product with adapters. `ranks` [num_rows, stride] are those of A x; `ends` has the
// output behind each slice.
struct AdaptedRows {
  const StepAdapters* step;
  int64_t layer;
  AdapterWeight AdapterLayer::*product;
  BFloat16* ranks;
  int64_t stride;
  std::array<int64_t, kAdapterSlices> ends;

  // Whether any adapter of the step adds to the product.
  bool any() const {
    return std::any_of(step->layers, step->layers + step->count, [&](const AdapterLayer* layers) {
      return (layers[layer].*product).a != nullptr;
    });
  }

  // Null for a row to which nothing is added.
  const AdapterWeight* weight_of(int64_t row) const {
    const int32_t adapter = step->of_rows[row];
    if (adapter < 0) return nullptr;
    const AdapterWeight* weight = &(step->layers[adapter][layer].*product);
    return weight->a == nullptr ? nullptr : weight;
  }

  // Adds to `sums` what a row's adapter adds to 16 outputs.
  void add(int64_t row, const AdapterWeight& weight, int64_t output, Floats& sums) const {
    size_t slice = 0;
    int64_t begin = 0;
    while (slice < kAdapterSlices && output >= ends[slice]) begin = ends[slice++];
    if (slice == kAdapterSlices) return;
    const AdapterSlice& own = weight.slices[slice];
    const BFloat16* b = own.b + (output - begin) * own.num_ranks;
    const BFloat16* inputs = ranks + row * stride + own.first_rank;
    // Two sums, as each addition waits for the one before.
    Floats even{}, odd{};
    for (int64_t rank = 0; rank < own.num_ranks; rank += 4, b += 4 * kPanelOutputs) {
      even = plus_products(even, load_pairs(b), twice_each(inputs + rank));
      odd = plus_products(odd, load_pairs(b + 2 * kPanelOutputs), twice_each(inputs + rank + 2));
    }
    sums += even + odd;
  }
};

// Rows `row` ... `row + count - 1`, all of one adapter, and a part of its ranks.
struct RankItem {
  int64_t row, count, part;
};

// Ranks are computed for up to so many rows at a time.
constexpr int kRankRows = 4;

// The ranks of a step's rows: what threads share of them.
class RankItems {
 public:
  // `num_parts` of the ranks are computed apart, for steps of few rows.
  RankItems(const StepAdapters& step, int64_t num_rows, int num_threads) {
    std::vector<RankItem> rows;
    for (int64_t row = 0; row < num_rows;) {
      const int32_t adapter = step.of_rows[row];
      int64_t end = row + 1;
      while (end < num_rows && end < row + kRankRows && step.of_rows[end] == adapter) ++end;
      if (adapter >= 0) rows.push_back({row, end - row, 0});
      row = end;
    }
    const auto count = static_cast<int64_t>(rows.size());
    num_parts_ = count >= 2 * num_threads ? 1 : 2 * num_threads;
    items_.reserve(static_cast<size_t>(count * num_parts_));
    for (const RankItem& item : rows) {
      for (int64_t part = 0; part < num_parts_; ++part) {
        items_.push_back({item.row, item.count, part});
      }
    }
  }

  int64_t count() const { return static_cast<int64_t>(items_.size()); }

  // The item's ranks of `rows` [num_rows, num_inputs].
  void compute(int64_t at, const AdaptedRows& adapted, const BFloat16* rows,
               int64_t num_inputs) const {
    const RankItem& item = items_[static_cast<size_t>(at)];
    const AdapterWeight* weight = adapted.weight_of(item.row);
    if (weight == nullptr) return;
    const int64_t begin = weight->num_ranks * item.part / num_parts_;
    const int64_t end = weight->num_ranks * (item.part + 1) / num_parts_;
    for (int64_t rank = begin; rank < end; ++rank) {
      const BFloat16* a = weight->a + rank * num_inputs;
      switch (item.count) {
        case 1:
          dot<1>(a, rows, item.row, num_inputs, rank, adapted);
          break;
        case 2:
          dot<2>(a, rows, item.row, num_inputs, rank, adapted);
          break;
        case 3:
          dot<3>(a, rows, item.row, num_inputs, rank, adapted);
          break;
        default:
          dot<kRankRows>(a, rows, item.row, num_inputs, rank, adapted);
      }
    }
  }

 private:
  template <int kRows>
  static void dot(const BFloat16* a, const BFloat16* rows, int64_t row, int64_t num_inputs,
                  int64_t rank, const AdaptedRows& adapted) {
    Floats sums[kRows] = {};
    for (int64_t i = 0; i < num_inputs; i += 2 * kLanes) {
      const Pairs pairs = load_pairs(a + i);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        sums[r] = plus_products(sums[r], pairs, load_pairs(rows + (row + r) * num_inputs + i));
      }
    }
    for (int r = 0; r < kRows; ++r) {
      const uint32_t word = rounded(Floats{} + sum(sums[r]))[0] >> 16;
      adapted.ranks[(row + r) * adapted.stride + rank] = {static_cast<uint16_t>(word)};
    }
  }

  int64_t num_parts_;
  std::vector<RankItem> items_;
};

}  // namespace
