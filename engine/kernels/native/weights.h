// Weights in the layout of the products, wide or quantized, and rounding of rows for quantized
// ones.
//
// A panel is 16 outputs of a weight matrix [num_outputs, num_inputs]. A product reads a panel from
// first to last. Panels come in twos; missing outputs are zeros.
//
// | format    | contents of a panel for each 8 inputs                                             |
// |-----------|-----------------------------------------------------------------------------------|
// | bfloat16  | 4 vectors, one per pair of inputs: the pair of the first output, of the second ...|
// | int8      | the same with bytes                                                               |
// | float8    | the same with bytes: e4m3, without infinities                                     |
// | int4      | one vector of 32 half words; the k-th nibble of each is that of pair k, plus 8    |
// | int8 dot  | 2 vectors, one per 4 inputs: the four bytes of the first output ...               |
//
// | format    | contents of a panel for each 32 inputs                                            |
// |-----------|-----------------------------------------------------------------------------------|
// | 8 bits    | as int8                                                                           |
// | 4 bits    | as int4, with codes plus `code_zero` in the nibbles                               |
// | 5 bits    | the lowest four as 4 bits, then a vector of half words: bit i of each is the fifth |
// |           | bit of pair i                                                                     |
// | 6 bits    | the lowest four as 4 bits, then a vector of half words for each 16 inputs: bits 2i |
// |           | and 2i + 1 of each are the highest bits of pair i                                 |
//
// Integers and e4m3 are exact in bfloat16, whose dot products of pairs multiply them with rows of
// bfloat16. int8 dot multiplies them with rows of bytes and sums integers. Formats of 32 inputs
// multiply them with rows of int16, see group_dot.h.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "lanes.h"

namespace {

constexpr int64_t kPanelOutputs = kLanes;
// Inputs that a tile's loop takes at a time: widths are multiples of it.
constexpr int kUnrolled = 8;
constexpr int64_t kLineBytes = 64;

// kCodes are codes of another format in bfloat16, to which products convert them, and kGroupCodes in
// int16. kGroup4 to kGroup8 have 4, 5, 6 and 8 bits and groups of 16 or 32 inputs.
enum class Format : int32_t {
  kBFloat16,
  kInt8,
  kFloat8,
  kInt4,
  kInt8Dot,
  kCodes,
  kGroup4,
  kGroup5,
  kGroup6,
  kGroup8,
  kGroupCodes
};

constexpr bool has_groups(Format format) { return format >= Format::kGroup4; }

// Bytes of a panel for each 8 inputs.
constexpr int64_t octet_bytes(Format format) {
  return format == Format::kBFloat16 || format == Format::kCodes ||
                 format == Format::kGroupCodes
             ? 4 * kLineBytes
         : format == Format::kInt4 || format == Format::kGroup4   ? kLineBytes
         : format == Format::kGroup5                              ? kLineBytes * 5 / 4
         : format == Format::kGroup6                              ? kLineBytes * 6 / 4
                                                                  : 2 * kLineBytes;
}

// Inputs after which a product prefetches.
constexpr int64_t turn_inputs(Format format) { return has_groups(format) ? 32 : kUnrolled; }

// Rounding of a row before a product. Dynamic scales are those of the row, or of each group of its
// inputs.
enum class Activation : int32_t {
  kNone,
  kInt8,
  kInt8Static,
  kFloat8,
  kFloat8Static,
  kFloat8Groups,
  kInt16Groups
};

enum class ScaleType : int32_t { kFloat, kFloat16 };

// Weight of a product. `scales` [num_panels, num_groups, 16] is null for bfloat16. A group's sum
// becomes scale * (sum - zero * sum of the inputs). `offsets`, of the same shape or null, are scale
// * zero. For int8 dot they are 128 times the sums of the weights: int32 [num_panels, 16]. For
// formats of groups, each value is (code - code_zero) * scale + offset, and scales and offsets are
// of `scale_type`; otherwise scales are float32. `order` [num_inputs], the input at each place, and
// `bias` [num_outputs] may be null.
struct Weight {
  const std::byte* codes;
  const void* scales;
  const void* offsets;
  const BFloat16* bias;
  const int64_t* order;
  int64_t group_inputs;
  Format format;
  Activation activation;
  float activation_scale;
  ScaleType scale_type;
  int32_t code_zero;

  // 16 of `from`, which is `scales` or `offsets` of a format of groups, from element `at` on.
  Floats load_scales(const void* from, int64_t at) const {
    return scale_type == ScaleType::kFloat16 ? load(static_cast<const Float16*>(from) + at)
                                             : load(static_cast<const float*>(from) + at);
  }
  bool has_zeros() const { return offsets != nullptr && format != Format::kInt8Dot; }
  bool prepares() const {
    return order != nullptr || activation != Activation::kNone || has_zeros();
  }
};

#ifdef __AVX512BF16__
using Pairs = __m512bh;
inline Pairs load_pairs(const void* from) { return (Pairs)_mm512_loadu_si512(from); }
inline Pairs twice_each(const BFloat16* from) {
  return (Pairs)_mm512_set1_epi32(unaligned<int32_t>(from));
}
inline void store_pairs(void* to, Pairs pairs) { _mm512_storeu_si512(to, (__m512i)pairs); }
inline Floats plus_products(Floats sums, Pairs weights, Pairs inputs) {
  return (Floats)_mm512_dpbf16_ps((__m512)sums, weights, inputs);
}
#else
// First and second elements of pairs.
struct Pairs {
  Floats even, odd;
};
inline Pairs load_pairs(const void* from) {
  Pairs pairs;
  load_pair(static_cast<const BFloat16*>(from), pairs.even, pairs.odd);
  return pairs;
}
inline Pairs twice_each(const BFloat16* from) {
  const auto word = unaligned<uint32_t>(from);
  return {(Floats)(Words{} + (word << 16)), (Floats)(Words{} + (word & 0xffff0000u))};
}
inline void store_pairs(void* to, const Pairs& pairs) {
  store_pair(static_cast<BFloat16*>(to), pairs.even, pairs.odd);
}
inline Floats plus_products(Floats sums, const Pairs& weights, const Pairs& inputs) {
  return sums + weights.even * inputs.even + weights.odd * inputs.odd;
}
#endif

// Four pairs of 8 inputs of a panel at `from`; `pair` is called with each number once, in order.
template <Format kFormat>
class Octet;

template <>
class Octet<Format::kBFloat16> {
 public:
  explicit Octet(const std::byte* from) : from_(from) {}
  Pairs pair(int k) const { return load_pairs(from_ + k * kLineBytes); }

 private:
  const std::byte* from_;
};

template <>
class Octet<Format::kCodes> : public Octet<Format::kBFloat16> {
 public:
  using Octet<Format::kBFloat16>::Octet;
};

template <>
class Octet<Format::kInt8> {
 public:
  explicit Octet(const std::byte* from) : from_(from) {}
  Pairs pair(int k) const {
    const std::byte* at = from_ + k * kLineBytes / 2;
#ifdef __AVX512BF16__
    const auto floats = [](const std::byte* bytes) {
      const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
      return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
    };
    return _mm512_cvtne2ps_pbh(floats(at + 16), floats(at));
#else
    const Words words = __builtin_convertvector(unaligned<Halves>(at), Words);
    return {__builtin_convertvector((Ints)(words << 24) >> 24, Floats),
            __builtin_convertvector((Ints)(words << 16) >> 24, Floats)};
#endif
  }

 private:
  const std::byte* from_;
};

template <>
class Octet<Format::kFloat8> {
 public:
  explicit Octet(const std::byte* from) : from_(from) {}
  Pairs pair(int k) const {
    const std::byte* at = from_ + k * kLineBytes / 2;
#ifdef __AVX512BF16__
    const __m512i codes =
        _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
    // Exponents are 120 less than bfloat16's. Numbers below 2^-6 are subnormal.
    const __m512i magnitudes =
        _mm512_slli_epi16(_mm512_and_si512(codes, _mm512_set1_epi16(0x7f)), 4);
    const __m512i normal = _mm512_add_epi16(magnitudes, _mm512_set1_epi16(120 << 7));
    const __mmask32 is_small = _mm512_testn_epi16_mask(codes, _mm512_set1_epi16(0x78));
    const __m512i values =
        _mm512_mask_permutexvar_epi16(normal, is_small, codes, _mm512_load_si512(kSmall));
    const __m512i signs = _mm512_slli_epi16(codes, 8);
    // The sign of one operand, all other bits of the other.
    return (Pairs)_mm512_ternarylogic_epi32(_mm512_set1_epi16(-0x8000), signs, values, 0xca);
#else
    const Words words = __builtin_convertvector(unaligned<Halves>(at), Words);
    return {floats(words), floats(words >> 8)};
#endif
  }

 private:
#ifdef __AVX512BF16__
  // 0 to 7 times 2^-9, four times, because the index has five bits.
  alignas(64) static constexpr uint16_t kSmall[32] = {
      0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60,
      0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60,
      0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60,
      0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
#else
  static Floats floats(Words codes) {
    const Floats magnitudes = (Floats)((codes & 0x7fu) << 20) * 0x1p120f;
    return (Floats)((Words)magnitudes | (codes & 0x80u) << 24);
  }
#endif
  const std::byte* from_;
};

template <>
class Octet<Format::kInt4> {
 public:
#ifdef __AVX512BF16__
  explicit Octet(const std::byte* from) : nibbles_(_mm512_loadu_si512(from)) {}
  Pairs pair(int k) const {
    const __m512i shifted = _mm512_srli_epi16(nibbles_, static_cast<unsigned>(4 * k));
    return (Pairs)_mm512_permutexvar_epi16(shifted, _mm512_load_si512(kValues));
  }

 private:
  // -8 to 7 in bfloat16, twice, because the index has five bits.
  alignas(64) static constexpr uint16_t kValues[32] = {
      0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
      0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
      0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
      0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
  __m512i nibbles_;
#else
  explicit Octet(const std::byte* from) : nibbles_(unaligned<Words>(from)) {}
  Pairs pair(int k) const {
    const auto values = [&](int shift) {
      return __builtin_convertvector((Ints)((nibbles_ >> shift) & 15u), Floats) - 8.0f;
    };
    return {values(4 * k), values(16 + 4 * k)};
  }

 private:
  Words nibbles_;
#endif
};

// Adds to each output's sum its four products of signed bytes at `weights` with the unsigned
// `inputs`.
inline Ints plus_byte_products(Ints sums, const std::byte* weights, const uint8_t* inputs) {
#if defined(__AVX512VNNI__)
  const __m512i four = _mm512_set1_epi32(unaligned<int32_t>(inputs));
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, four, _mm512_loadu_si512(weights));
#else
  const Words words = unaligned<Words>(weights);
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) {
    sums += ((Ints)(words << (24 - 8 * k)) >> 24) * static_cast<int32_t>(inputs[k]);
  }
  return sums;
#endif
}

// Largest magnitude of `count` elements; NaN counts as larger than all others.
inline float largest_magnitude(const BFloat16* row, int64_t count) {
  uint16_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    largest = std::max(largest, static_cast<uint16_t>(row[i].bits & 0x7fff));
  }
  const uint32_t bits = uint32_t{largest} << 16;
  return unaligned<float>(&bits);
}

inline Floats bounded(Floats values, float least, float most) {
  values = values < least ? Floats{} + least : values;
  return values > most ? Floats{} + most : values;
}

// Rounds to the nearest value of e4m3, ties to even; larger values become the largest.
inline Floats to_float8(Floats values) {
  constexpr float kMost = 448.0f, kLeastNormal = 0x1p-6f, kSteps = 0x1p9f;
  values = bounded(values, -kMost, kMost);
  const Words words = (Words)values, signs = words & 0x80000000u;
  const Floats magnitudes = (Floats)(words & 0x7fffffffu);
  const Words normal = (words + 0x7ffffu + (words >> 20 & 1u)) & 0xfff00000u;
  const Words small = (Words)(to_integer(magnitudes * kSteps) / kSteps) | signs;
  return (Floats)(magnitudes < kLeastNormal ? small : normal);
}

constexpr float kMostInt8 = 127.0f, kMostFloat8 = 448.0f;

// Scale of `count` inputs; `most` is the largest magnitude of a code. A value that is not finite
// makes the scale not finite, because 8-bit codes could not show it.
inline float row_scale(const Weight& weight, const BFloat16* row, int64_t count, float most) {
  const float scale = largest_magnitude(row, count) / most;
  const bool is_static = weight.activation == Activation::kInt8Static ||
                         weight.activation == Activation::kFloat8Static;
  if (is_static && scale - scale == 0) return weight.activation_scale;
  return scale == 0 ? 1.0f : scale;
}

// Sum of `count` elements.
inline float sum_of(const BFloat16* row, int64_t count) {
  Floats sums{};
  for (int64_t i = 0; i < count; i += kLanes) sums += load(row + i);
  return sum(sums);
}

// A row in the order of the weight's columns: itself, or a copy in `scratch`.
inline const BFloat16* in_order(const Weight& weight, const BFloat16* row, int64_t num_inputs,
                                BFloat16* scratch) {
  if (weight.order == nullptr) return row;
  for (int64_t i = 0; i < num_inputs; ++i) scratch[i] = row[weight.order[i]];
  return scratch;
}

// Rounds a row for `weight`. `codes` gets codes in bfloat16, or bytes plus 128 for int8 dot, and
// `scales` one scale for the row or for each group. `scratch` holds a row. Widths and groups are
// multiples of 16.
inline void round_row(const Weight& weight, const BFloat16* row, int64_t num_inputs,
                      BFloat16* scratch, void* codes, float* scales) {
  row = in_order(weight, row, num_inputs, scratch);
  const Activation activation = weight.activation;
  if (activation == Activation::kNone) {
    std::memcpy(codes, row, static_cast<size_t>(num_inputs) * sizeof *row);
    *scales = 1.0f;
    return;
  }
  const bool is_int8 = activation == Activation::kInt8 || activation == Activation::kInt8Static;
  const float most = is_int8 ? kMostInt8 : kMostFloat8;
  const int64_t group = activation == Activation::kFloat8Groups ? weight.group_inputs : num_inputs;
  for (int64_t begin = 0; begin < num_inputs; begin += group, ++scales) {
    *scales = row_scale(weight, row + begin, group, most);
    for (int64_t i = begin; i < begin + group; i += kLanes) {
      const Floats scaled = load(row + i) / *scales;
      if (!is_int8) {
        store(static_cast<BFloat16*>(codes) + i, to_float8(scaled));
        continue;
      }
      const Floats whole = to_integer(bounded(scaled, -kMostInt8 - 1, kMostInt8));
      if (weight.format != Format::kInt8Dot) {
        store(static_cast<BFloat16*>(codes) + i, whole);
        continue;
      }
      using Bytes = uint8_t __attribute__((vector_size(kLanes)));
      const Words words = __builtin_convertvector(whole + 128.0f, Words);
      const Bytes bytes = __builtin_convertvector(words, Bytes);
      std::memcpy(static_cast<uint8_t*>(codes) + i, &bytes, sizeof bytes);
    }
  }
}

// Like `round_row`; if the weight has zeros, `sums` gets the sum of each group's codes.
inline void prepare_row(const Weight& weight, const BFloat16* row, int64_t num_inputs,
                        BFloat16* scratch, void* codes, float* scales, float* sums) {
  round_row(weight, row, num_inputs, scratch, codes, scales);
  if (!weight.has_zeros()) return;
  const auto* rounded = static_cast<const BFloat16*>(codes);
  for (int64_t begin = 0; begin < num_inputs; begin += weight.group_inputs) {
    *sums++ = sum_of(rounded + begin, weight.group_inputs);
  }
}

}  // namespace
