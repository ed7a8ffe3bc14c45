// All layers of a decoder for a flat batch in one parallel region: no Python runs and no thread is
// woken between two products. For rows of one token, the operations, their order and every bit of
// the result equal those of the functions for single operations. Several new tokens of a sequence
// attend in bfloat16, see prefill_attention.h.

#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include <omp.h>

#include "adapters.h"
#include "attention.h"
#include "elementwise.h"
#include "prefill_attention.h"
#include "products.h"
#include "ranks.h"
#include "team.h"

namespace {

// Norms of heads may be null. A window of 0 means that a token sees all tokens.
struct Layer {
  const BFloat16 *attention_norm, *query_norm, *key_norm, *mlp_norm;
  const Weight *qkv, *output, *gate_up, *down;
  void* cache;
  int64_t window;
};

struct DecoderShape {
  int64_t num_layers, hidden, inner, num_queries, num_keys, head_dim, block_size;
  float epsilon, scale;
  bool has_int8_cache;
};

// Input of a step, see millrace_rotate_store and millrace_decode_attention. `hidden` [count,
// hidden], the residual stream, is the input and becomes the result. It is float32, because every
// layer adds to it: its rounding to bfloat16 would be most of the error of a step. The first `num_single` rows are sequences of one new
// token each, by rising length. Then come `num_chunks` sequences of several new tokens;
// `chunk_ends` has the row after each. `starts` and `lengths` are of all sequences. `adapters` is
// null if no row has an adapter; otherwise `most_ranks` is the largest number of ranks of a
// product. `features` [count, num_features, hidden] gets each row's `hidden` before the layers
// `feature_layers`. `inputs` [count, num_inputs], if not null, are the inputs of the first layer's
// attention in place of normed rows. With `ranks`, the weights are one rank's, and their additions
// to `hidden` are summed over all ranks.
struct StepRows {
  float* hidden;
  const float *cosines, *sines;
  const int64_t* slots;
  const int32_t* tables;
  const int64_t* starts;
  const int32_t* lengths;
  int64_t num_single, num_chunks;
  const int64_t* chunk_ends;
  const StepAdapters* adapters;
  int64_t most_ranks;
  BFloat16* features;
  const int64_t* feature_layers;
  int64_t num_features;
  const BFloat16* inputs;
  int64_t num_inputs;
  Ranks* ranks;

  int64_t count() const { return num_chunks > 0 ? chunk_ends[num_chunks - 1] : num_single; }
};

using Buffer = std::unique_ptr<BFloat16[]>;

inline Buffer buffer(int64_t size) {
  return std::make_unique_for_overwrite<BFloat16[]>(static_cast<size_t>(size));
}

class Counters {
 public:
  explicit Counters(size_t count) : counters_(count) {}
  std::atomic<int64_t>& operator[](size_t at) { return counters_[at].value; }

 private:
  struct alignas(64) Counter {
    std::atomic<int64_t> value{0};
  };
  std::vector<Counter> counters_;
};

// Up to this many numbers, each thread norms all rows itself, which is faster than a barrier.
constexpr int64_t kNormedByEach = 65536;
// The same limit for rows that are prepared for quantized weights.
constexpr int64_t kPreparedByEach = 8192;

inline void norm_rows(const DecoderShape& shape, const StepRows& rows, const BFloat16* weight,
                      int64_t begin, int64_t end, BFloat16* out) {
  for (int64_t row = begin; row < end; ++row) {
    rms_norm_row(rows.hidden + row * shape.hidden, weight, out + row * shape.hidden, shape.hidden,
                 shape.epsilon);
  }
}

// Rounds a row's input of a layer to its features, if they are wanted.
inline void keep_features(const DecoderShape& shape, const StepRows& rows, int64_t layer,
                          int64_t row) {
  for (int64_t i = 0; i < rows.num_features; ++i) {
    if (rows.feature_layers[i] != layer) continue;
    const float* from = rows.hidden + row * shape.hidden;
    BFloat16* to = rows.features + (row * rows.num_features + i) * shape.hidden;
    for (int64_t at = 0; at < shape.hidden; at += kLanes) store(to + at, load(from + at));
  }
}

// Attention of a layer as numbered items that threads share. The class is virtual, so that the step
// is compiled once for all head sizes and cache types.
class StepAttention {
 public:
  StepAttention() = default;
  StepAttention(const StepAttention&) = delete;
  StepAttention& operator=(const StepAttention&) = delete;
  virtual ~StepAttention() = default;

  // Rotates a row's queries and keys, and stores its keys and values.
  virtual void rotate_store(const Layer& layer, int64_t row) const = 0;

  // Number of sections of keys and values, which are all packed before attention begins.
  virtual int64_t num_sections() const = 0;
  virtual void pack(const Layer& layer, int64_t item) const = 0;

  virtual int64_t num_items() const = 0;
  virtual void attend(const Layer& layer, int64_t item) const = 0;
};

// `heads` [count, num_queries + 2 * num_keys, head_dim], `attended` [count, num_queries, head_dim].
template <int kVectors, typename C>
class HeadsAttention final : public StepAttention {
 public:
  HeadsAttention(const DecoderShape& shape, const StepRows& rows, BFloat16* heads,
                 BFloat16* attended, int num_threads)
      : shape_(shape),
        rows_(rows),
        heads_(heads),
        attended_(attended),
        group_(shape.num_queries / shape.num_keys),
        line_size_((shape.num_queries + 2 * shape.num_keys) * kHeadDim),
        heads_of_item_(heads_of_item(rows.num_single, shape.num_keys, num_threads)) {
    int64_t num_sections = 0;
    for (int64_t i = 0, begin = rows.num_single; i < rows.num_chunks; ++i) {
      const int64_t end = rows.chunk_ends[i], at = rows.num_single + i;
      chunks_.push_back({begin, end, rows.lengths[at] - (end - begin),
                         rows.tables + rows.starts[at], nullptr});
      num_sections += chunks_.back().num_sections();
      begin = end;
    }
    packed_ = buffer(num_sections * shape.num_keys * section_size(kHeadDim));
    BFloat16* packed = packed_.get();
    for (Chunk& chunk : chunks_) {
      chunk.packed = packed;
      packed += chunk.num_sections() * shape.num_keys * section_size(kHeadDim);
      for (int64_t head = 0; head < shape.num_keys; ++head) {
        for (int64_t s = 0; s < chunk.num_sections(); ++s) sections_.push_back({&chunk, head, s});
        for (int64_t tile = chunk.num_tiles() - 1; tile >= 0; --tile) {
          for (int64_t g = 0; g < group_; ++g) tiles_.push_back({&chunk, head * group_ + g, tile});
        }
      }
    }
  }

  void rotate_store(const Layer& layer, int64_t row) const override {
    BFloat16* queries = heads_ + row * line_size_;
    BFloat16* keys = queries + shape_.num_queries * kHeadDim;
    const float* cosine = rows_.cosines + row * kHeadDim / 2;
    const float* sine = rows_.sines + row * kHeadDim / 2;
    rotate_heads(queries, shape_.num_queries, kHeadDim, cosine, sine, layer.query_norm,
                 shape_.epsilon);
    rotate_heads(keys, shape_.num_keys, kHeadDim, cosine, sine, layer.key_norm, shape_.epsilon);
    store_token(keys, cache(layer), rows_.slots[row]);
  }

  int64_t num_sections() const override { return static_cast<int64_t>(sections_.size()); }

  void pack(const Layer& layer, int64_t item) const override {
    const auto& [chunk, head, section] = sections_[static_cast<size_t>(item)];
    if ((section + 1) * kSectionKeys <= first_seen(layer, chunk->context)) return;
    pack_section<kVectors>(*chunk, cache(layer), head, section, section_of(*chunk, head, section));
  }

  int64_t num_items() const override { return num_tiles() + rows_.num_single * parts(); }

  // Tiles of chunks come first, because they take longest.
  void attend(const Layer& layer, int64_t item) const override {
    if (item < num_tiles()) return attend_chunk(layer, tiles_[static_cast<size_t>(item)]);
    item -= num_tiles();
    // The longest rows are last in order and start first, so that no thread ends late on one.
    const int64_t row = rows_.num_single - 1 - item / parts();
    const int64_t head = item % parts() * heads_of_item_;
    const int64_t last = rows_.lengths[row], query = head * group_;
    thread_local std::vector<float> scratch;
    scratch.resize(attend_scratch(heads_of_item_, group_, last, kHeadDim));
    ::attend<BFloat16, C, kVectors>(
        heads_ + row * line_size_ + query * kHeadDim, cache(layer),
        rows_.tables + rows_.starts[row],
        attended_ + (row * shape_.num_queries + query) * kHeadDim, head, heads_of_item_, group_,
        first_seen(layer, last - 1), last, shape_.scale, scratch.data());
  }

 private:
  static constexpr int64_t kHeadDim = kVectors * kLanes;

  struct Section {
    const Chunk* chunk;
    int64_t head, section;
  };
  struct Tile {
    const Chunk* chunk;
    int64_t query, tile;
  };

  int64_t parts() const { return shape_.num_keys / heads_of_item_; }
  int64_t num_tiles() const { return static_cast<int64_t>(tiles_.size()); }

  int64_t first_seen(const Layer& layer, int64_t position) const {
    return layer.window > 0 ? std::max<int64_t>(0, position + 1 - layer.window) : 0;
  }

  Cache<C> cache(const Layer& layer) const {
    return {layer.cache, shape_.block_size, shape_.num_keys, kHeadDim};
  }

  BFloat16* section_of(const Chunk& chunk, int64_t head, int64_t section) const {
    return chunk.packed + (head * chunk.num_sections() + section) * section_size(kHeadDim);
  }

  void attend_chunk(const Layer& layer, const Tile& item) const {
    thread_local TileScratch<kVectors> scratch;
    const Chunk& chunk = *item.chunk;
    const int64_t size = chunk.end - chunk.begin;
    const int64_t row = size * item.tile / chunk.num_tiles();
    const int64_t count = size * (item.tile + 1) / chunk.num_tiles() - row;
    const int64_t at = chunk.begin + row;
    static constexpr auto kAttendTile = attend_tiles(std::make_integer_sequence<int, kTileRows>{});
    kAttendTile[static_cast<size_t>(count - 1)](
        chunk, row, heads_ + at * line_size_ + item.query * kHeadDim, line_size_,
        section_of(chunk, item.query / group_, 0), layer.window, shape_.scale,
        attended_ + (at * shape_.num_queries + item.query) * kHeadDim,
        shape_.num_queries * kHeadDim, scratch);
  }

  using AttendTile = void (*)(const Chunk&, int64_t, const BFloat16*, int64_t, const BFloat16*,
                              int64_t, float, BFloat16*, int64_t, TileScratch<kVectors>&);
  // Functions by the number of rows minus one.
  template <int... kRowsLessOne>
  static constexpr auto attend_tiles(std::integer_sequence<int, kRowsLessOne...>) {
    return std::array<AttendTile, kTileRows>{attend_tile<kVectors, kRowsLessOne + 1>...};
  }

  const DecoderShape& shape_;
  const StepRows& rows_;
  BFloat16 *heads_, *attended_;
  const int64_t group_, line_size_, heads_of_item_;
  std::deque<Chunk> chunks_;
  Buffer packed_;
  std::vector<Section> sections_;
  std::vector<Tile> tiles_;
};

// Null for a head size without a compiled variant.
template <typename C>
std::unique_ptr<StepAttention> step_attention(const DecoderShape& shape, const StepRows& rows,
                                              BFloat16* heads, BFloat16* attended,
                                              int num_threads) {
  const auto of = [&]<int kVectors>() -> std::unique_ptr<StepAttention> {
    return std::make_unique<HeadsAttention<kVectors, C>>(shape, rows, heads, attended,
                                                         num_threads);
  };
  switch (shape.head_dim) {
    case 32:
      return of.template operator()<2>();
    case 64:
      return of.template operator()<4>();
    case 96:
      return of.template operator()<6>();
    case 128:
      return of.template operator()<8>();
    case 256:
      return of.template operator()<16>();
    default:
      return nullptr;
  }
}

// Numbers that a thread sums over the ranks at a time.
constexpr int64_t kSummedAtOnce = 4096;

// Returns false and computes nothing for a head size without a compiled variant, or for more rows
// than the ranks can exchange.
inline bool decoder_step(const DecoderShape& shape, const Layer* layers, const StepRows& rows) {
  constexpr size_t kPhases = 19;
  const int64_t count = rows.count(), query_size = shape.num_queries * shape.head_dim;
  const int64_t head_size = query_size + 2 * shape.num_keys * shape.head_dim;
  const bool normed_by_each = count * shape.hidden <= kNormedByEach;
  const int most_threads = omp_get_max_threads();
  const bool prepares = std::any_of(layers, layers + shape.num_layers, [](const Layer& layer) {
    return layer.qkv->prepares() || layer.output->prepares() || layer.gate_up->prepares() ||
           layer.down->prepares();
  });
  const Buffer all_normed = buffer(count * shape.hidden * (normed_by_each ? most_threads : 1));
  const Buffer heads = buffer(count * head_size), attended = buffer(count * query_size);
  const Buffer gated_rows = buffer(count * shape.inner);
  const int64_t widest = std::max({shape.hidden, rows.num_inputs, query_size, shape.inner});
  PreparedRows prepared(prepares ? count * widest : 0);
  const auto make = shape.has_int8_cache ? step_attention<int8_t> : step_attention<BFloat16>;
  const auto attention = make(shape, rows, heads.get(), attended.get(), most_threads);
  if (attention == nullptr) return false;
  if (rows.ranks != nullptr && count * shape.hidden > rows.ranks->buffer_floats) return false;
  const std::array<int64_t, kAdapterSlices> one_matrix{shape.hidden, shape.hidden, shape.hidden};
  const bool is_adapted = rows.adapters != nullptr;
  const Buffer ranks = buffer(is_adapted ? count * rows.most_ranks : 0);
  const RankItems rank_items(is_adapted ? *rows.adapters : StepAdapters{},
                             is_adapted ? count : 0, rows.most_ranks);
  Counters counters(static_cast<size_t>(shape.num_layers) * kPhases);
  Team team;
#pragma omp parallel
  {
    const int num_threads = omp_get_num_threads();
    BFloat16* normed = all_normed.get();
    if (normed_by_each) normed += omp_get_thread_num() * count * shape.hidden;
    PreparedRows own_prepared(prepares ? kPreparedByEach : 0);
    size_t phase = 0;
    const auto share = [&](int64_t items, auto&& use) {
      share_items(counters[phase++], items, num_threads, use);
      team.wait(num_threads);
    };
    const auto norm = [&](const BFloat16* weight) {
      if (normed_by_each) {
        ++phase;
        return norm_rows(shape, rows, weight, 0, count, normed);
      }
      share(count, [&](int64_t row, int64_t) {
        norm_rows(shape, rows, weight, row, row + 1, normed);
      });
    };
    // `product` belongs to `layer`; each of `ends` is the end of one matrix's outputs.
    const auto multiply = [&](Product product, int64_t layer, AdapterWeight AdapterLayer::*part,
                              std::array<int64_t, kAdapterSlices> ends) {
      const AdaptedRows adapted{rows.adapters, layer, part, ranks.get(), rows.most_ranks, ends};
      if (is_adapted && adapted.any()) {
        const auto* inputs = static_cast<const BFloat16*>(product.rows);
        share(rank_items.count(), [&](int64_t item, int64_t) {
          rank_items.compute(item, adapted, inputs, product.num_inputs);
        });
        product.adapted = &adapted;
      } else {
        ++phase;
      }
      if (product.weight->prepares()) {
        if (count * product.num_inputs <= kPreparedByEach) {
          for (int64_t row = 0; row < count; ++row) own_prepared.prepare(product, row);
          ++phase;
          product = own_prepared.of(product);
        } else {
          share(count, [&](int64_t row, int64_t) { prepared.prepare(product, row); });
          product = prepared.of(product);
        }
      }
      const Items items = items_of(product, num_threads);
      share(items.count(), [&](int64_t item, int64_t next) {
        multiply_item(product, items, item, next);
      });
    };
    Ranks ranks = rows.ranks != nullptr ? *rows.ranks : Ranks{};
    const auto add_product = [&](const BFloat16* inputs, const Weight* weight, int64_t num_inputs,
                                 int64_t layer, AdapterWeight AdapterLayer::*part) {
      Product product{inputs, weight, nullptr, count, num_inputs, shape.hidden, Finish::kAdd};
      product.wide = rows.hidden;
      if (rows.ranks == nullptr) {
        ++phase;
        return multiply(product, layer, part, one_matrix);
      }
      product.finish = Finish::kWrite;
      product.wide = ranks.buffer(ranks.rank);
      multiply(product, layer, part, one_matrix);
      if (omp_get_thread_num() == 0) meet_ranks(ranks, count * shape.hidden);
      team.wait(num_threads);
      const int64_t size = count * shape.hidden;
      share((size + kSummedAtOnce - 1) / kSummedAtOnce, [&](int64_t item, int64_t) {
        sum_ranks(ranks, rows.hidden, item * kSummedAtOnce,
                  std::min(size, (item + 1) * kSummedAtOnce), true);
      });
      ++ranks.exchange;
    };
    for (int64_t at = 0; at < shape.num_layers; ++at) {
      const Layer* layer = layers + at;
      const bool has_inputs = at == 0 && rows.inputs != nullptr;
      if (!has_inputs) norm(layer->attention_norm);
      multiply({has_inputs ? rows.inputs : normed, layer->qkv, heads.get(), count,
                has_inputs ? rows.num_inputs : shape.hidden, head_size, Finish::kWrite},
               at, &AdapterLayer::qkv, {query_size, (query_size + head_size) / 2, head_size});
      share(count, [&](int64_t row, int64_t) {
        keep_features(shape, rows, at, row);
        attention->rotate_store(*layer, row);
      });
      if (rows.num_chunks > 0) {
        share(attention->num_sections(),
              [&](int64_t item, int64_t) { attention->pack(*layer, item); });
      }
      share(attention->num_items(),
            [&](int64_t item, int64_t) { attention->attend(*layer, item); });
      add_product(attended.get(), layer->output, query_size, at, &AdapterLayer::output);
      norm(layer->mlp_norm);
      multiply({normed, layer->gate_up, gated_rows.get(), count, shape.hidden, 2 * shape.inner,
                Finish::kGate},
               at, &AdapterLayer::gate_up, {shape.inner, 2 * shape.inner, 2 * shape.inner});
      add_product(gated_rows.get(), layer->down, shape.inner, at, &AdapterLayer::down);
    }
    if (rows.ranks != nullptr && omp_get_thread_num() == 0) *rows.ranks = ranks;
  }
  return true;
}

}  // namespace
