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

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "lanes.h"
#include "weights.h"

namespace {

// Inputs of a block, in which a panel's codes are stored, and of a row that share a scale.
constexpr int64_t kBlockInputs = 32;
constexpr float kMostInt16 = 32767.0f;

// `Shorts` are pairs of codes, or of a row's numbers, and `Dots` sums of their products, both of 16
// outputs. `HalfWords` are unsigned Shorts.
#if defined(__AVX2__) && !defined(__AVX512BW__)
// GCC moves vectors that are wider than the CPU's through memory.
template <typename Half>
struct Twice {
  Half low, high;
  friend Twice operator<<(Twice v, uint16_t by) {
    return {static_cast<Half>(v.low << by), static_cast<Half>(v.high << by)};
  }
  friend Twice operator>>(Twice v, uint16_t by) {
    return {static_cast<Half>(v.low >> by), static_cast<Half>(v.high >> by)};
  }
  friend Twice operator&(Twice v, uint16_t mask) {
    return {static_cast<Half>(v.low & mask), static_cast<Half>(v.high & mask)};
  }
  friend Twice operator|(Twice a, Twice b) {
    return {static_cast<Half>(a.low | b.low), static_cast<Half>(a.high | b.high)};
  }
  friend Twice operator+(Twice a, Twice b) { return {a.low + b.low, a.high + b.high}; }
};
using HalfWords = Twice<uint16_t __attribute__((vector_size(2 * kLanes)))>;
using HalfInts = int32_t __attribute__((vector_size(2 * kLanes)));
using Shorts = Twice<HalfInts>;
using Dots = Twice<HalfInts>;
// Panels whose sums fit the registers together.
constexpr int kPanelsAtOnce = 1;

template <typename V>
inline V load_halves(const std::byte* from) {
  return {unaligned<decltype(V::low)>(from), unaligned<decltype(V::low)>(from + kLineBytes / 2)};
}
inline void store_halves(std::byte* to, Shorts shorts) {
  std::memcpy(to, &shorts.low, sizeof shorts.low);
  std::memcpy(to + kLineBytes / 2, &shorts.high, sizeof shorts.high);
}
inline Shorts as_shorts(HalfWords codes) { return {(HalfInts)codes.low, (HalfInts)codes.high}; }
inline Dots each(int32_t value) { return {HalfInts{} + value, HalfInts{} + value}; }
inline Shorts pair_for_all(const int16_t* inputs) { return each(unaligned<int32_t>(inputs)); }

inline Shorts shorts_of(const std::byte* from) {
  const auto* bytes = reinterpret_cast<const __m128i*>(from);
  return {(HalfInts)_mm256_cvtepi8_epi16(_mm_loadu_si128(bytes)),
          (HalfInts)_mm256_cvtepi8_epi16(_mm_loadu_si128(bytes + 1))};
}

inline HalfInts plus_pair_products(HalfInts sums, HalfInts codes, HalfInts inputs) {
#if defined(__AVXVNNI__)
  return (HalfInts)_mm256_dpwssd_avx_epi32((__m256i)sums, (__m256i)codes, (__m256i)inputs);
#else
  sums += (HalfInts)_mm256_madd_epi16((__m256i)codes, (__m256i)inputs);
  // Keeps the order of additions, in which no product waits in memory.
  asm("" : "+x"(sums));
  return sums;
#endif
}
inline Dots plus_pair_products(Dots sums, Shorts codes, Shorts inputs) {
  return {plus_pair_products(sums.low, codes.low, inputs.low),
          plus_pair_products(sums.high, codes.high, inputs.high)};
}

inline Floats floats_of(Dots dots) {
  using HalfFloats = float __attribute__((vector_size(2 * kLanes)));
  const HalfFloats halves[2] = {__builtin_convertvector(dots.low, HalfFloats),
                                __builtin_convertvector(dots.high, HalfFloats)};
  return unaligned<Floats>(halves);
}
#else
using Shorts = int16_t __attribute__((vector_size(4 * kLanes)));
using HalfWords = uint16_t __attribute__((vector_size(4 * kLanes)));
using Dots = Ints;
constexpr int kPanelsAtOnce = 2;

template <typename V>
inline V load_halves(const std::byte* from) {
  return unaligned<V>(from);
}
inline void store_halves(std::byte* to, Shorts shorts) { std::memcpy(to, &shorts, sizeof shorts); }
inline Shorts as_shorts(HalfWords codes) { return (Shorts)codes; }
inline Dots each(int32_t value) { return Ints{} + value; }
inline Shorts pair_for_all(const int16_t* inputs) { return (Shorts)each(unaligned<int32_t>(inputs)); }

inline Shorts shorts_of(const std::byte* from) {
#if defined(__AVX512BW__)
  return (Shorts)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#else
  using Bytes = int8_t __attribute__((vector_size(2 * kLanes)));
  return __builtin_convertvector(unaligned<Bytes>(from), Shorts);
#endif
}

inline Dots plus_pair_products(Dots sums, Shorts codes, Shorts inputs) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)codes, (__m512i)inputs);
#elif defined(__AVX512BW__)
  sums += (Ints)_mm512_madd_epi16((__m512i)codes, (__m512i)inputs);
  // Keeps the order of additions, in which no product waits in memory.
  asm("" : "+v"(sums));
  return sums;
#else
  const auto evens = [](Shorts pairs) { return (Ints)((Words)pairs << 16) >> 16; };
  const auto odds = [](Shorts pairs) { return (Ints)pairs >> 16; };
  return sums + evens(codes) * evens(inputs) + odds(codes) * odds(inputs);
#endif
}

inline Floats floats_of(Dots dots) { return __builtin_convertvector(dots, Floats); }
#endif

// Four pairs of codes of the octet `at` (0 to 3) of a block of a panel.
template <Format kFormat>
class CodeOctet {
 public:
  CodeOctet(const std::byte* block, int64_t at) {
    if constexpr (kFormat == Format::kGroup8 || kFormat == Format::kGroupCodes) {
      from_ = block + at * octet_bytes(kFormat);
    } else {
      nibbles_ = load_halves<HalfWords>(block + at * kLineBytes);
      const std::byte* more = block + 4 * kLineBytes;
      if constexpr (kFormat == Format::kGroup5) {
        high_ = load_halves<HalfWords>(more) >> static_cast<uint16_t>(4 * at);
      } else if constexpr (kFormat == Format::kGroup6) {
        high_ = load_halves<HalfWords>(more + at / 2 * kLineBytes) >>
                static_cast<uint16_t>(8 * (at % 2));
      }
    }
  }

  // `k` is a constant of an unrolled loop.
  Shorts pair(int k) const {
    if constexpr (kFormat == Format::kGroupCodes) {
      return load_halves<Shorts>(from_ + k * kLineBytes);
    } else if constexpr (kFormat == Format::kGroup8) {
      return shorts_of(from_ + k * kLineBytes / 2);
    } else {
      HalfWords codes = (nibbles_ >> static_cast<uint16_t>(4 * k)) & uint16_t{0xf};
      if constexpr (kFormat == Format::kGroup5) {
        codes = codes | ((high_ << static_cast<uint16_t>(4 - k)) & uint16_t{0x10});
      } else if constexpr (kFormat == Format::kGroup6) {
        const HalfWords placed = k < 2 ? high_ << static_cast<uint16_t>(4 - 2 * k)
                                       : high_ >> static_cast<uint16_t>(2 * k - 4);
        codes = codes | (placed & uint16_t{0x30});
      }
      return as_shorts(codes);
    }
  }

 private:
  const std::byte* from_ = nullptr;
  HalfWords nibbles_, high_;
};

// Rows of int16 and what belongs to them, see `prepare_group_row`: those of the first row of a tile.
// `stride` rows follow one another in each block, so that the addresses of a tile's rows differ by
// constants.
struct GroupRows {
  const int16_t* codes;
  const float* scales;
  const float* sums;
  const int32_t* starts;
  int64_t stride;
};

// Adds to `sums` the products of kRows neighbouring `rows` with two panels of the number `panel`.
// `ask` prefetches and is called once for each block.
template <Format kFormat, int kRows, typename Ask>
__attribute__((always_inline)) inline void sum_groups(const Weight& weight, GroupRows rows,
                                                      int64_t num_inputs,
                                                      const std::byte* const (&panels)[2],
                                                      const int64_t (&panel)[2], Ask&& ask,
                                                      Floats (&sums)[kRows][2]) {
  // Few sums wait for one another, so they are split; integers can be added in any order.
  constexpr int kChains = kRows <= 2 ? 2 : 1;
  constexpr int64_t kStride = octet_bytes(kFormat) * kBlockInputs / kUnrolled;
  const int64_t size = weight.group_inputs, num_groups = num_inputs / size;
  const bool has_starts = weight.code_zero != 0;
  const std::byte* from[2] = {panels[0], panels[1]};
  int64_t at[2] = {panel[0] * num_groups * kLanes, panel[1] * num_groups * kLanes};
  // Adds the products of a group of the panels from `v` on, whose inputs begin at `begin`.
  const auto add_group = [&](int v, int64_t begin) {
    Dots dots[kChains][kRows][kPanelsAtOnce];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Dots start = each(has_starts ? rows.starts[r] : 0);
#pragma GCC unroll 2
      for (int p = 0; p < kPanelsAtOnce; ++p) {
        dots[0][r][p] = start;
        if constexpr (kChains > 1) dots[1][r][p] = each(0);
      }
    }
    const int16_t* inputs = rows.codes + begin;
    const int64_t end = (begin + size) / kUnrolled;
    for (int64_t octet = begin / kUnrolled; octet < end; ++octet, inputs += kUnrolled) {
      const CodeOctet<kFormat> codes(from[v], octet), more(from[v + kPanelsAtOnce - 1], octet);
#pragma GCC unroll 4
      for (int k = 0; k < kUnrolled / 2; ++k) {
        const Shorts pair = codes.pair(k), other = more.pair(k);
        auto& chain = dots[k % kChains];
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          const Shorts both = pair_for_all(inputs + r * kBlockInputs + 2 * k);
          chain[r][0] = plus_pair_products(chain[r][0], pair, both);
          if constexpr (kPanelsAtOnce > 1) {
            chain[r][1] = plus_pair_products(chain[r][1], other, both);
          }
        }
      }
    }
#pragma GCC unroll 2
    for (int p = 0; p < kPanelsAtOnce; ++p) {
      const Floats scale = weight.load_scales(weight.scales, at[v + p]);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        Dots dot = dots[0][r][p];
        if constexpr (kChains > 1) dot = dot + dots[1][r][p];
        sums[r][v + p] += floats_of(dot) * (scale * rows.scales[r]);
      }
      if (weight.offsets != nullptr) {
        const Floats offset = weight.load_scales(weight.offsets, at[v + p]);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) sums[r][v + p] += offset * rows.sums[r];
      }
      at[v + p] += kLanes;
    }
  };
  for (int64_t block = 0; block < num_inputs; block += kBlockInputs) {
    ask();
    for (int64_t begin = 0; begin < kBlockInputs; begin += size) {
      for (int v = 0; v < 2; v += kPanelsAtOnce) add_group(v, begin);
      rows.sums += rows.stride;
      rows.starts += rows.stride;
    }
    from[0] += kStride;
    from[1] += kStride;
    rows.codes += rows.stride * kBlockInputs;
    rows.scales += rows.stride;
  }
}

// Converts a panel of codes to int16.
template <Format kFormat>
void widen_groups(const std::byte* from, int64_t num_inputs, std::byte* to) {
  constexpr int64_t kStride = octet_bytes(kFormat) * kBlockInputs / kUnrolled;
  for (int64_t block = 0; block < num_inputs; block += kBlockInputs, from += kStride) {
    for (int64_t at = 0; at < kBlockInputs / kUnrolled; ++at) {
      const CodeOctet<kFormat> codes(from, at);
#pragma GCC unroll 4
      for (int k = 0; k < kUnrolled / 2; ++k, to += kLineBytes) {
        store_halves(to, codes.pair(k));
      }
    }
  }
}

inline int32_t sum(Ints v) {
  v += __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  return v[0] + v[1] + v[2] + v[3];
}

// Rounds a row for `weight` to int16 `codes` with a scale for each 32 inputs, which is not finite
// for inputs that are not finite. For each of the weight's groups, `sums` gets the sum of its codes
// times their scale, and `starts` the number at which a sum of products begins to undo `code_zero`.
// Blocks of a row, and its numbers of one block or group, are `stride` rows apart. `scratch` holds a
// row.
inline void prepare_group_row(const Weight& weight, const BFloat16* row, int64_t num_inputs,
                              int64_t stride, BFloat16* scratch, int16_t* codes, float* scales,
                              float* sums, int32_t* starts) {
  row = in_order(weight, row, num_inputs, scratch);
  const int64_t per_group = weight.group_inputs / kLanes;
  for (int64_t block = 0; block < num_inputs; block += kBlockInputs) {
    const float largest = largest_magnitude(row + block, kBlockInputs) / kMostInt16;
    const float scale = largest == 0 ? 1.0f : largest;
    *scales = scale;
    int32_t total = 0;
    for (int64_t half = 0; half < kBlockInputs / kLanes; ++half) {
      const Floats scaled = load(row + block + half * kLanes) / scale;
      const Floats whole = to_integer(bounded(scaled, -kMostInt16, kMostInt16));
      const Ints integers = __builtin_convertvector(whole, Ints);
      using Half = int16_t __attribute__((vector_size(2 * kLanes)));
      const Half narrow = __builtin_convertvector(integers, Half);
      std::memcpy(codes + half * kLanes, &narrow, sizeof narrow);
      total += sum(integers);
      if ((half + 1) % per_group == 0) {
        *sums = scale * static_cast<float>(total);
        *starts = -weight.code_zero * total;
        total = 0;
        sums += stride;
        starts += stride;
      }
    }
    codes += stride * kBlockInputs;
    scales += stride;
  }
}

}  // namespace
