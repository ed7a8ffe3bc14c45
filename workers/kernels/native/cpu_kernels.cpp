// What a decoder computes on a CPU, as functions of C: RMSNorm, the product of SwiGLU, RoPE together
// with the write to the KV cache, the attention of single-token rows, matrix products with packed
// weights, and a whole step of all these. Element types: 0 float32, 1 bfloat16, 2 float16.

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

int millrace_rms_norm(int type, const void* in, const void* weight, void* out, int64_t rows,
                      int64_t width, float epsilon) {
  MILLRACE_DISPATCH(type, rms_norm<T>, IN(in), IN(weight), OUT(out), rows, width, epsilon)
}

int millrace_swiglu(int type, const void* gate_up, void* out, int64_t rows, int64_t width) {
  MILLRACE_DISPATCH(type, swiglu<T>, IN(gate_up), OUT(out), rows, width)
}

// `tokens` [rows]: the first of the largest logits of each row, or -1 if that is not finite.
int millrace_likeliest(int type, const void* logits, int64_t rows, int64_t width, int64_t* tokens) {
  MILLRACE_DISPATCH(type, likeliest<T>, IN(logits), rows, width, tokens)
}

// `cache` is of int8 if `has_int8_cache`, else of the type.
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

// Takes bfloat16 alone, as the products do. `layers`: [num_layers] of Layer in decoder_step.h, as
// addresses and numbers of 64 bits. `adapters`: [num_adapters] addresses of AdapterLayer [num_layers] in
// adapters.h, in the same form; null if there are none.
int millrace_decoder_step(const void* layers, int64_t num_layers, int64_t hidden_size,
                          int64_t inner_size, int64_t num_queries, int64_t num_keys,
                          int64_t head_dim, int64_t block_size, float epsilon, float scale,
                          void* hidden, const float* cosines, const float* sines,
                          const int64_t* slots, const int32_t* tables, const int64_t* starts,
                          const int32_t* lengths, int64_t num_single, int64_t num_chunks,
                          const int64_t* chunk_ends, int has_int8_cache, const void* adapters,
                          int64_t num_adapters, const int32_t* adapter_of_rows,
                          int64_t most_ranks, void* features, const int64_t* feature_layers,
                          int64_t num_features, const void* inputs, int64_t num_inputs) {
  using T = BFloat16;
  const DecoderShape shape{num_layers, hidden_size, inner_size, num_queries, num_keys,
                           head_dim,   block_size,  epsilon,    scale,       has_int8_cache != 0};
  const StepAdapters with{static_cast<const AdapterLayer* const*>(adapters), num_adapters,
                          adapter_of_rows};
  const StepRows step{OUT(hidden), cosines,    sines,
                      slots,       tables,     starts,
                      lengths,     num_single, num_chunks,
                      chunk_ends,  num_adapters > 0 ? &with : nullptr,
                      most_ranks,  OUT(features), feature_layers,
                      num_features, IN(inputs), num_inputs};
  return decoder_step(shape, static_cast<const Layer*>(layers), step) ? 0 : 1;
}

}  // extern "C"
