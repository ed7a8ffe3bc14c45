// Operations of a decoder on a CPU, as C functions: RMSNorm, SwiGLU, RoPE with the write to the KV
// cache, attention of single-token rows, matrix products with packed weights, and a whole step of
// all these. Element types: 0 float32, 1 bfloat16, 2 float16.

#include <cstdint>

#include "attention.h"
#include "decoder_step.h"
#include "elementwise.h"
#include "likeliest.h"
#include "products.cpp"

#define MILLRACE_DISPATCH(type, function, ...) \
  switch (type) {                              \
    case 0: {                                  \
      using T = float;                         \
      function(__VA_ARGS__);                   \
      return 0;                                \
    }                                          \
    case 1: {                                  \
      using T = BFloat16;                      \
      function(__VA_ARGS__);                   \
      return 0;                                \
    }                                          \
    case 2: {                                  \
      using T = Float16;                       \
      function(__VA_ARGS__);                   \
      return 0;                                \
    }                                          \
    default:                                   \
      return 1;                                \
  }

#define IN(pointer) static_cast<const T*>(pointer)
#define OUT(pointer) static_cast<T*>(pointer)

extern "C" {

// `in` is float32; `weight` and `out` are of `type`.
int millrace_rms_norm(int type, const float* in, const void* weight, void* out, int64_t rows,
                      int64_t width, float epsilon) {
  MILLRACE_DISPATCH(type, rms_norm<T>, in, IN(weight), OUT(out), rows, width, epsilon)
}

int millrace_swiglu(int type, const void* gate_up, void* out, int64_t rows, int64_t width) {
  MILLRACE_DISPATCH(type, swiglu<T>, IN(gate_up), OUT(out), rows, width)
}

// `tokens` [rows] gets the first token of the largest logit of each row, or -1 if it is not finite.
int millrace_likeliest(const float* logits, int64_t rows, int64_t width, int64_t* tokens) {
  likeliest(logits, rows, width, tokens);
  return 0;
}

// The entries of `cache` are int8 if `has_int8_cache`, otherwise of `type`.
int millrace_rotate_store(int type, void* heads, const float* cosines, const float* sines,
                          const void* query_norm, const void* key_norm, float epsilon, void* cache,
                          const int64_t* slots, int64_t rows, int64_t num_queries,
                          int64_t num_keys, int64_t head_dim, int64_t block_size,
                          int has_int8_cache) {
#define MILLRACE_STORE(entry)                                                                    \
  rotate_store(OUT(heads), cosines, sines, IN(query_norm), IN(key_norm), epsilon,                \
               Cache<entry>(cache, block_size, num_keys, head_dim), slots, rows, num_queries)
  if (has_int8_cache) {
    MILLRACE_DISPATCH(type, MILLRACE_STORE, int8_t)
  }
  MILLRACE_DISPATCH(type, MILLRACE_STORE, T)
#undef MILLRACE_STORE
}

int millrace_decode_attention(int type, const void* queries, int64_t query_stride, void* cache,
                              const int32_t* tables, const int64_t* starts,
                              const int32_t* lengths, void* out, int64_t rows,
                              int64_t num_queries, int64_t num_keys, int64_t head_dim,
                              int64_t block_size, int64_t window, float scale,
                              int has_int8_cache) {
  const auto attend = [&](auto run) {
    return run(head_dim, queries, query_stride, cache, tables, starts, lengths, out, rows,
               num_queries, num_keys, block_size, window, scale);
  };
  switch (type) {
    case 0:
      return attend(has_int8_cache ? decode_any<float, int8_t> : decode_any<float, float>);
    case 1:
      return attend(has_int8_cache ? decode_any<BFloat16, int8_t>
                                   : decode_any<BFloat16, BFloat16>);
    case 2:
      return attend(has_int8_cache ? decode_any<Float16, int8_t> : decode_any<Float16, Float16>);
    default:
      return 1;
  }
}

// Weights are bfloat16 or quantized, as for the products, and `hidden` is float32. `layers` is [num_layers] of Layer in decoder_step.h, as
// 64-bit addresses and numbers. `adapters` is [num_adapters] addresses of AdapterLayer [num_layers]
// in adapters.h, in the same form, or null.
int millrace_decoder_step(const void* layers, int64_t num_layers, int64_t hidden_size,
                          int64_t inner_size, int64_t num_queries, int64_t num_keys,
                          int64_t head_dim, int64_t block_size, float epsilon, float scale,
                          float* hidden, const float* cosines, const float* sines,
                          const int64_t* slots, const int32_t* tables, const int64_t* starts,
                          const int32_t* lengths, int64_t num_single, int64_t num_chunks,
                          const int64_t* chunk_ends, int has_int8_cache, const void* adapters,
                          int64_t num_adapters, const int32_t* adapter_of_rows,
                          int64_t most_ranks, void* features, const int64_t* feature_layers,
                          int64_t num_features, const void* inputs, int64_t num_inputs,
                          void* ranks) {
  using T = BFloat16;
  const DecoderShape shape{num_layers, hidden_size, inner_size, num_queries, num_keys,
                           head_dim,   block_size,  epsilon,    scale,       has_int8_cache != 0};
  const StepAdapters with{static_cast<const AdapterLayer* const*>(adapters), num_adapters,
                          adapter_of_rows};
  const StepRows step{hidden,      cosines,    sines,
                      slots,       tables,     starts,
                      lengths,     num_single, num_chunks,
                      chunk_ends,  num_adapters > 0 ? &with : nullptr,
                      most_ranks,  OUT(features), feature_layers,
                      num_features, IN(inputs), num_inputs, static_cast<Ranks*>(ranks)};
  return decoder_step(shape, static_cast<const Layer*>(layers), step) ? 0 : 1;
}

// `ranks` is a Ranks of ranks.h. Returns 0, or the group's failure.
int millrace_ranks_all_reduce(void* ranks, int type, void* rows, int64_t count) {
  auto& group = *static_cast<Ranks*>(ranks);
  const auto reduce = [&]() { MILLRACE_DISPATCH(type, all_reduce<T>, group, OUT(rows), count) };
  if (reduce() != 0) return -1;
  return static_cast<int>(group.header->failure.value.load(std::memory_order_acquire));
}

// Waits for all ranks; this rank has written `num_brought` numbers to its buffer.
int millrace_ranks_meet(void* ranks, int64_t num_brought) {
  auto& group = *static_cast<Ranks*>(ranks);
  meet_ranks(group, num_brought);
  ++group.exchange;
  return static_cast<int>(group.header->failure.value.load(std::memory_order_acquire));
}

// Announces that `number` messages have been posted to the ranks.
void millrace_ranks_post(void* ranks, uint32_t number) {
  set_word(static_cast<Ranks*>(ranks)->header->posted, number);
}

// Waits without limit until `number` messages have been posted.
int millrace_ranks_await(void* ranks, uint32_t number) {
  const auto& group = *static_cast<Ranks*>(ranks);
  if (!await_word(group, group.header->posted, number, 0)) {
    return static_cast<int>(group.header->failure.value.load(std::memory_order_acquire));
  }
  return 0;
}

// Sets a word `arrived` of a group without exchanges, which uses the words as other counters.
void millrace_ranks_set_word(void* ranks, int32_t index, uint32_t value) {
  set_word(static_cast<Ranks*>(ranks)->header->arrived[index], value);
}

// Waits until a word reaches the value, without limit or, with `has_bound`, for the ranks' timeout.
// Returns 0, or the failure.
int millrace_ranks_await_word(void* ranks, int32_t index, uint32_t value, int has_bound) {
  auto& group = *static_cast<Ranks*>(ranks);
  RankHeader& header = *group.header;
  if (await_word(group, header.arrived[index], value, has_bound ? group.timeout_ns : 0)) return 0;
  fail_ranks(header, kTimedOut | static_cast<uint32_t>(index) << kRankShift);
  return static_cast<int>(header.failure.value.load(std::memory_order_acquire));
}

void millrace_ranks_abort(void* ranks) { fail_ranks(*static_cast<Ranks*>(ranks)->header, kAborted); }

}  // extern "C"
