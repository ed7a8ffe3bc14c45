// Products of rows of int16 with codes of 4, 5, 6 or 8 bits in groups of 16 or 32 inputs.
//
// Rows have a float32 scale for each 32 inputs. A group's products are summed in int32, which is
// exact: 32 products of magnitudes up to 32,767 and 128 stay below 2^28. So the order of a group's
// sum does not matter, and the groups are added in float32 from first to last.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "lanes.h"
#include "weights.h"

namespace {

// Inputs of a block, in which a panel's codes are stored, and of a row that share a scale.
constexpr int64_t kBlockInputs = 32;
constexpr float kMostInt16 = 32767.0f;

// A pair of codes, or of a row's numbers, for each of 16 outputs.
using Shorts = int16_t __attribute__((vector_size(4 * kLanes)));
using HalfWords = uint16_t __attribute__((vector_size(4 * kLanes)));

// Adds the two products of each pair.
inline Ints plus_pair_products(Ints sums, Shorts codes, Shorts inputs) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)codes, (__m512i)inputs);
#elif defined(__AVX512BW__)
  return sums + (Ints)_mm512_madd_epi16((__m512i)codes, (__m512i)inputs);
#elif defined(__AVX2__)
  using Half = int16_t __attribute__((vector_size(2 * kLanes)));
  const auto* code = reinterpret_cast<const Half*>(&codes);
  const auto* input = reinterpret_cast<const Half*>(&inputs);
  auto* sum = reinterpret_cast<__m256i*>(&sums);
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
#if defined(__AVXVNNI__)
    sum[half] = _mm256_dpwssd_avx_epi32(sum[half], (__m256i)code[half], (__m256i)input[half]);
#else
    sum[half] = _mm256_add_epi32(sum[half],
                                 _mm256_madd_epi16((__m256i)code[half], (__m256i)input[half]));
#endif
  }
  return sums;
#else
  const auto evens = [](Shorts pairs) { return (Ints)((Words)pairs << 16) >> 16; };
  const auto odds = [](Shorts pairs) { return (Ints)pairs >> 16; };
  return sums + evens(codes) * evens(inputs) + odds(codes) * odds(inputs);
#endif
}

inline Shorts pair_for_all(const int16_t* inputs) {
  return (Shorts)(Ints{} + unaligned<int32_t>(inputs));
}

// Four pairs of codes of the octet `at` (0 to 3) of a block of a panel.
template <Format kFormat>
class CodeOctet {
 public:
  CodeOctet(const std::byte* block, int64_t at) {
    if constexpr (kFormat == Format::kGroup8) {
      from_ = block + at * 2 * kLineBytes;
    } else {
      nibbles_ = unaligned<HalfWords>(block + at * kLineBytes);
      const std::byte* more = block + 4 * kLineBytes;
      if constexpr (kFormat == Format::kGroup5) {
        high_ = unaligned<HalfWords>(more) >> static_cast<uint16_t>(4 * at);
      } else if constexpr (kFormat == Format::kGroup6) {
        high_ = unaligned<HalfWords>(more + at / 2 * kLineBytes) >>
                static_cast<uint16_t>(8 * (at % 2));
      }
    }
  }

  // `k` is a constant of an unrolled loop.
  Shorts pair(int k) const {
    if constexpr (kFormat == Format::kGroup8) {
      using Bytes = int8_t __attribute__((vector_size(2 * kLanes)));
      return __builtin_convertvector(unaligned<Bytes>(from_ + k * kLineBytes / 2), Shorts);
    } else {
      HalfWords codes = (nibbles_ >> static_cast<uint16_t>(4 * k)) & uint16_t{15};
      if constexpr (kFormat == Format::kGroup5) {
        codes |= (high_ << static_cast<uint16_t>(4 - k)) & uint16_t{0x10};
      } else if constexpr (kFormat == Format::kGroup6) {
        const HalfWords placed = k < 2 ? high_ << static_cast<uint16_t>(4 - 2 * k)
                                       : high_ >> static_cast<uint16_t>(2 * k - 4);
        codes |= placed & uint16_t{0x30};
      }
      return (Shorts)codes;
    }
  }

 private:
  const std::byte* from_ = nullptr;
  HalfWords nibbles_, high_;
};

// Rows of int16 and what belongs to them, see `prepare_group_row`.
struct GroupRows {
  const int16_t* codes;
  const float* scales;
  const float* sums;
  const int32_t* starts;
};

// Adds to `sums` the products of kRows neighbouring `rows` with two panels of the number `panel`.
// `ask` prefetches and is called once for each block.
template <Format kFormat, int kRows, typename Ask>
__attribute__((always_inline)) inline void sum_groups(const Weight& weight, const GroupRows& rows,
                                                      int64_t num_inputs,
                                                      const std::byte* const (&panels)[2],
                                                      const int64_t (&panel)[2], Ask&& ask,
                                                      Floats (&sums)[kRows][2]) {
  // Few sums wait for one another, so they are split; integers can be added in any order.
  constexpr int kChains = kRows <= 2 ? 2 : 1;
  constexpr int64_t kStride = octet_bytes(kFormat) * kBlockInputs / kUnrolled;
  const int64_t size = weight.group_inputs;
  const int64_t num_groups = num_inputs / size, num_blocks = num_inputs / kBlockInputs;
  const std::byte *first = panels[0], *second = panels[1];
  int64_t group = 0;
  for (int64_t block = 0; block < num_blocks; ++block, first += kStride, second += kStride) {
    ask();
    for (int64_t begin = 0; begin < kBlockInputs; begin += size, ++group) {
      Ints dots[kChains][kRows][2] = {};
      if (rows.starts != nullptr) {
        for (int r = 0; r < kRows; ++r) {
          dots[0][r][0] = dots[0][r][1] = Ints{} + rows.starts[r * num_groups + group];
        }
      }
      for (int64_t at = begin / kUnrolled; at < (begin + size) / kUnrolled; ++at) {
        const CodeOctet<kFormat> codes(first, at), more(second, at);
        const int16_t* inputs = rows.codes + block * kBlockInputs + at * kUnrolled;
#pragma GCC unroll 4
        for (int k = 0; k < kUnrolled / 2; ++k) {
          const Shorts pair = codes.pair(k), other = more.pair(k);
          auto& chain = dots[k % kChains];
#pragma GCC unroll 16
          for (int r = 0; r < kRows; ++r) {
            const Shorts both = pair_for_all(inputs + r * num_inputs + 2 * k);
            chain[r][0] = plus_pair_products(chain[r][0], pair, both);
            chain[r][1] = plus_pair_products(chain[r][1], other, both);
          }
        }
      }
      for (int v = 0; v < 2; ++v) {
        const int64_t at = (panel[v] * num_groups + group) * kLanes;
        const Floats scale = weight.load_scales(weight.scales, at);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          Ints dot = dots[0][r][v];
          if constexpr (kChains > 1) dot += dots[1][r][v];
          sums[r][v] += __builtin_convertvector(dot, Floats) *
                        (scale * rows.scales[r * num_blocks + block]);
        }
        if (weight.offsets != nullptr) {
          const Floats offset = weight.load_scales(weight.offsets, at);
          for (int r = 0; r < kRows; ++r) sums[r][v] += offset * rows.sums[r * num_groups + group];
        }
      }
    }
  }
}

inline int32_t sum(Ints values) {
  int32_t total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += values[lane];
  return total;
}

// Rounds a row for `weight` to `codes`, int16 [num_inputs], with `scales` [num_inputs / 32], which
// are not finite for inputs that are not finite. For each of the weight's groups, `sums` gets the
// sum of its codes times their scale, and `starts` the number at which a sum of products begins to
// undo `code_zero`. `scratch` holds a row.
inline void prepare_group_row(const Weight& weight, const BFloat16* row, int64_t num_inputs,
                              BFloat16* scratch, int16_t* codes, float* scales, float* sums,
                              int32_t* starts) {
  row = in_order(weight, row, num_inputs, scratch);
  const int64_t per_group = weight.group_inputs / kLanes;
  for (int64_t block = 0; block < num_inputs; block += kBlockInputs) {
    const float largest = largest_magnitude(row + block, kBlockInputs) / kMostInt16;
    const float scale = largest == 0 ? 1.0f : largest;
    *scales++ = scale;
    int32_t total = 0;
    for (int64_t half = 0; half < kBlockInputs / kLanes; ++half) {
      const int64_t at = block + half * kLanes;
      const Floats whole = to_integer(bounded(load(row + at) / scale, -kMostInt16, kMostInt16));
      const Ints integers = __builtin_convertvector(whole, Ints);
      using Half = int16_t __attribute__((vector_size(2 * kLanes)));
      const Half narrow = __builtin_convertvector(integers, Half);
      std::memcpy(codes + at, &narrow, sizeof narrow);
      total += sum(integers);
      if ((half + 1) % per_group == 0) {
        *sums++ = scale * static_cast<float>(total);
        *starts++ = -weight.code_zero * total;
        total = 0;
      }
    }
  }
}

}  // namespace
