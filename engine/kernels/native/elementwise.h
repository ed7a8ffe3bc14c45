// RMSNorm, SwiGLU and RoPE. Arithmetic is in float32 and rounds once. Widths and head_dim are
// multiples of 32.

#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "lanes.h"

namespace {

template <typename T>
inline float inverse_rms(const T* values, int64_t width, float epsilon) {
  Floats squares[2] = {};
  for (int64_t i = 0; i < width; i += 2 * kLanes) {
    Floats first, second;
    load_pair(values + i, first, second);
    squares[0] += first * first;
    squares[1] += second * second;
  }
  const float mean = sum(squares[0] + squares[1]) / static_cast<float>(width);
  return 1.0f / std::sqrt(mean + epsilon);
}

template <typename In, typename T>
inline void rms_norm_row(const In* in, const T* weight, T* out, int64_t width, float epsilon) {
  const float scale = inverse_rms(in, width, epsilon);
  if constexpr (!std::is_same_v<In, T>) {  // the types differ in the order of `load_pair`
    for (int64_t i = 0; i < width; i += kLanes) {
      store(out + i, load(in + i) * scale * load(weight + i));
    }
    return;
  }
  for (int64_t i = 0; i < width; i += 2 * kLanes) {
    Floats first, second, first_weight, second_weight;
    load_pair(in + i, first, second);
    load_pair(weight + i, first_weight, second_weight);
    store_pair(out + i, first * scale * first_weight, second * scale * second_weight);
  }
}

template <typename T>
void rms_norm(const float* in, const T* weight, T* out, int64_t rows, int64_t width,
              float epsilon) {
#pragma omp parallel for schedule(static) if (rows * width > 32768)
  for (int64_t row = 0; row < rows; ++row) {
    rms_norm_row(in + row * width, weight, out + row * width, width, epsilon);
  }
}

inline Floats gated(Floats gate, Floats up) {
  // exp of -|gate|, so that nothing overflows.
  const Floats e = exponential(gate < 0.0f ? gate : -gate);
  return gate * ((gate < 0.0f ? e : Floats{} + 1.0f) / (1.0f + e)) * up;
}

template <typename T>
void swiglu(const T* gate_up, T* out, int64_t rows, int64_t width) {
#pragma omp parallel for schedule(static) if (rows * width > 16384)
  for (int64_t row = 0; row < rows; ++row) {
    const T* gates = gate_up + row * 2 * width;
    for (int64_t i = 0; i < width; i += 2 * kLanes) {
      Floats gate[2], up[2];
      load_pair(gates + i, gate[0], gate[1]);
      load_pair(gates + width + i, up[0], up[1]);
      store_pair(out + row * width + i, gated(gate[0], up[0]), gated(gate[1], up[1]));
    }
  }
}

// RMSNorm by `norm`, unless it is null, and RoPE of `count` heads of one token, in place.
template <typename T>
inline void rotate_heads(T* heads, int64_t count, int64_t head_dim, const float* cosine,
                         const float* sine, const T* norm, float epsilon) {
  const int64_t half = head_dim / 2;
  for (T* head = heads; head < heads + count * head_dim; head += head_dim) {
    if (norm != nullptr) rms_norm_row(head, norm, head, head_dim, epsilon);
    for (int64_t i = 0; i < half; i += kLanes) {
      const Floats low = load(head + i), high = load(head + half + i);
      const Floats c = load(cosine + i), s = load(sine + i);
      store(head + i, low * c - high * s);
      store(head + half + i, high * c + low * s);
    }
  }
}

}  // namespace
