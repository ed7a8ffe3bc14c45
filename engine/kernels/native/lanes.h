// Vectors of 16 float32 lanes, and loads and stores of the element types. They are the vector types
// of GCC and Clang, so that one source compiles to AVX-512, AVX2 and NEON.
//
// The code does not assume finite arithmetic: a NaN must reach the logits, where the engine detects
// it.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

namespace {

constexpr int kLanes = 16;
using Floats = float __attribute__((vector_size(4 * kLanes)));
using Ints = int32_t __attribute__((vector_size(4 * kLanes)));
using Words = uint32_t __attribute__((vector_size(4 * kLanes)));
using Halves = uint16_t __attribute__((vector_size(2 * kLanes)));
using Float16s = _Float16 __attribute__((vector_size(2 * kLanes)));

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <typename T>
inline T unaligned(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline Floats load(const float* from) { return unaligned<Floats>(from); }

inline Floats load(const BFloat16* from) {
#ifdef __AVX512BW__
  // GCC makes four shuffles of the conversion below, but the CPU has one instruction for it.
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
#else
  return (Floats)(__builtin_convertvector(unaligned<Halves>(from), Words) << 16);
#endif
}

inline Floats load(const Float16* from) {
#ifdef __AVX512F__
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__)
  // GCC converts one number at a time below.
  const auto* halves = reinterpret_cast<const __m128i*>(from);
  const __m256 both[2] = {_mm256_cvtph_ps(_mm_loadu_si128(halves)),
                          _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
  return unaligned<Floats>(both);
#else
  return __builtin_convertvector(unaligned<Float16s>(from), Floats);
#endif
}

inline void store(float* to, Floats values) { std::memcpy(to, &values, sizeof values); }

// Rounds to bfloat16 in the upper halves: to nearest, ties to even; NaN stays NaN.
inline Words rounded(Floats values) {
  const Words words = (Words)values;
  return values == values ? words + 0x7fffu + ((words >> 16) & 1u) : words | 0x400000u;
}

inline void store(BFloat16* to, Floats values) {
  const Words words = rounded(values) >> 16;
#ifdef __AVX512BW__
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16((__m512i)words));
#else
  const Halves halves = __builtin_convertvector(words, Halves);
  std::memcpy(to, &halves, sizeof halves);
#endif
}

inline void store(Float16* to, Floats values) {
#ifdef __AVX512F__
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                      _mm512_cvtps_ph((__m512)values, _MM_FROUND_TO_NEAREST_INT));
#else
  const Float16s halves = __builtin_convertvector(values, Float16s);
  std::memcpy(to, &halves, sizeof halves);
#endif
}

// Loads `count` of up to 16 elements.
template <typename T>
inline Floats load_some(const T* from, int64_t count) {
  if (count >= kLanes) return load(from);
  T all[kLanes] = {};
  if (count > 0) std::memcpy(all, from, static_cast<size_t>(count) * sizeof *from);
  return load(all);
}

template <typename T>
inline void store_some(T* to, Floats values, int64_t count) {
  if (count >= kLanes) return store(to, values);
  T all[kLanes];
  store(all, values);
  if (count > 0) std::memcpy(to, all, static_cast<size_t>(count) * sizeof *to);
}

// Loads 2 * kLanes neighbours as two vectors, in the order of elements that is cheapest for the
// type; store_pair restores it.
template <typename T>
inline void load_pair(const T* from, Floats& first, Floats& second) {
  first = load(from);
  second = load(from + kLanes);
}

template <>
inline void load_pair(const BFloat16* from, Floats& even, Floats& odd) {
  // Widening 16-bit lanes in order costs four shuffles; even and odd elements cost two shifts.
  const Words words = unaligned<Words>(from);
  even = (Floats)(words << 16);
  odd = (Floats)(words & 0xffff0000u);
}

template <typename T>
inline void store_pair(T* to, Floats first, Floats second) {
  store(to, first);
  store(to + kLanes, second);
}

template <>
inline void store_pair(BFloat16* to, Floats even, Floats odd) {
  const Words words = rounded(even) >> 16 | (rounded(odd) & 0xffff0000u);
  std::memcpy(to, &words, sizeof words);
}

inline Floats load(const int8_t* from) {
#ifdef __AVX512F__
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
#else
  using Bytes = int8_t __attribute__((vector_size(kLanes)));
  return __builtin_convertvector(unaligned<Bytes>(from), Floats);
#endif
}

// Loads a head of T or int8. The order of elements is the cheapest one, or with `kInOrder` theirs,
// as in int8.
template <bool kInOrder, int kVectors, typename T>
inline void load_head(const T* from, Floats (&to)[kVectors]) {
#pragma GCC unroll 16
  for (int v = 0; v < kVectors; v += 2) {
    if constexpr (kInOrder) {
      to[v] = load(from + v * kLanes);
      to[v + 1] = load(from + (v + 1) * kLanes);
    } else {
      load_pair(from + v * kLanes, to[v], to[v + 1]);
    }
  }
}

template <bool kInOrder, int kVectors, typename T>
inline void store_head(T* to, const float* values, float factor) {
  for (int v = 0; v < kVectors; v += 2) {
    const Floats first = load(values + v * kLanes) * factor;
    const Floats second = load(values + (v + 1) * kLanes) * factor;
    if constexpr (kInOrder) {
      store(to + v * kLanes, first);
      store(to + (v + 1) * kLanes, second);
    } else {
      store_pair(to + v * kLanes, first, second);
    }
  }
}

// Rounds to the nearest integer, ties to even, for magnitudes below 2^22.
inline Floats to_integer(Floats values) { return (values + 12582912.0f) - 12582912.0f; }

// Adds the halves, then the quarters of a vector; the first four elements hold the sums.
inline Floats folded(Floats v) {
  v += __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  return v;
}

inline float sum(Floats values) {
  const Floats four = folded(values);
  return (four[0] + four[1]) + (four[2] + four[3]);
}

// Stores the sums of four vectors side by side; they share their additions.
inline void store_sums(float* to, const Floats (&values)[4]) {
  const auto pairs = [](Floats a, Floats b) {
    return __builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
  };
  const Floats ab = pairs(values[0], values[1]), cd = pairs(values[2], values[3]);
  const Floats all = folded(
      __builtin_shufflevector(ab, cd, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
      __builtin_shufflevector(ab, cd, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31));
  std::memcpy(to, &all, 4 * sizeof(float));
}

// exp for arguments <= 0: 2^n times a polynomial on [-ln2/2, ln2/2], relative error below 1e-6.
inline Floats exponential(Floats x) {
  const Floats scaled = x * 1.44269504088896341f;
  const Floats shifted = scaled + 12582912.0f;  // 1.5 * 2^23: rounds to the nearest integer
  const Floats whole = shifted - 12582912.0f;
  const Floats rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  Floats p = rest * 1.3888889e-3f + 8.3333333e-3f;
  p = p * rest + 4.1666667e-2f;
  p = p * rest + 1.6666667e-1f;
  p = p * rest + 0.5f;
  p = p * rest + 1.0f;
  p = p * rest + 1.0f;
  const Ints power = (__builtin_convertvector(whole, Ints) + 127) << 23;
  const Floats result = p * (Floats)power;
  return x < -87.0f ? Floats{} : result;
}

}  // namespace
