// Four-bit and int8 panels as signed bytes with float32 scales: what a tile of many rows reads.

#pragma once

#include "linear.h"

namespace pageglass {

// A spread group: signed codes, where the integer accumulators start (int32), scales (float32), and in groups with an
// even number the rest of the zero points of this and the next (pairs of bfloat16).
constexpr int64_t kSpreadStart = kInt8CodeBytes, kSpreadScale = kSpreadStart + kPanel * 4,
                  kSpreadRest = kSpreadScale + kPanel * 4;
constexpr int64_t kSpreadGroupBytes = kSpreadRest + kPanel * 4;

// Zero points of 16 columns: whole parts, and what is left of them times the scale, negative as it is subtracted.
struct ZeroPoints {
  Ints whole;
  Floats rest;
};

inline ZeroPoints read_zero_points(const uint8_t* group, int half) {
  const auto* scales = reinterpret_cast<const uint16_t*>(group + kQ4CodeBytes);
  const Ints steps = load_int16(reinterpret_cast<const int16_t*>(scales) + kPanel + half * kLanes);
  const Ints whole = shift_right<8>(add_ints(steps, broadcast_int(128)));
  const Floats left = to_floats(sub_ints(shift_left<8>(whole), steps));
  return {whole, mul(mul(left, broadcast(1.0f / 256.0f)), load_f16(scales + half * kLanes))};
}

// Put the signed codes of 16 columns of a group where a spread panel has them, every other vector from `out` on, and
// return their sums. `whole`: the whole parts of their zero points.
template <bool IsInt8>
inline Ints spread_codes(const uint8_t* codes, Ints whole, uint8_t* out) {
  const Ints ones = broadcast_int(0x01010101), low = broadcast_int(0x0f0f0f0f);
  // The same byte for all four inputs of a column.
  const Ints zero = mul_ints(and_bits(whole, broadcast_int(0xff)), ones);
  Ints sum0 = broadcast_int(0), sum1 = broadcast_int(0);
#pragma GCC unroll 4
  for (int step = 0; step < 4; step++) {
    const Ints first = load_ints(codes + step * 128);
    Ints a, b;
    if constexpr (IsInt8) {
      a = sub_bytes(first, zero);
      b = sub_bytes(load_ints(codes + (step + 4) * 128), zero);
    } else {
      a = sub_bytes(and_bits(first, low), zero);
      b = sub_bytes(and_bits(shift_right_16bit(first, 4), low), zero);
    }
    store_ints(out + step * 128, a);
    store_ints(out + (step + 4) * 128, b);
    sum0 = dot_u8_s8(sum0, ones, a);
    sum1 = dot_u8_s8(sum1, ones, b);
  }
  return add_ints(sum0, sum1);
}

template <bool IsInt8, bool HasZeroPoints>
inline void spread_groups(const Linear& linear, const uint8_t* group, uint8_t* out) {
  constexpr int64_t kScales = IsInt8 ? kInt8CodeBytes : kQ4CodeBytes;
  constexpr int64_t kBytes = kScales + kScaleBytes * (HasZeroPoints ? 2 : 1);
  const int64_t num_groups = linear.num_groups;
  for (int64_t g = 0; g < num_groups; g++, group += kBytes, out += kSpreadGroupBytes) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      ZeroPoints zero_points{broadcast_int(linear.zero_point), broadcast(0.0f)};
      if constexpr (HasZeroPoints) zero_points = read_zero_points(group, half);
      const Ints sum = spread_codes<IsInt8>(group + half * 64, zero_points.whole, out + half * 64);
      store_ints(out + kSpreadStart + half * 64, sub_ints(broadcast_int(0), shift_left<7>(sum)));
      store(reinterpret_cast<float*>(out + kSpreadScale) + half * kLanes,
            load_f16(reinterpret_cast<const uint16_t*>(group + kScales) + half * kLanes));
      if constexpr (HasZeroPoints) {
        if (g % 2 == 0) {
          const bool is_last = g + 1 == num_groups;
          const Floats next = is_last ? broadcast(0.0f) : read_zero_points(group + kBytes, half).rest;
          store_ints(out + kSpreadRest + half * 64, bf16_pairs(zero_points.rest, next));
        }
      }
    }
  }
}

// A panel of int8 or Q4 codes as signed bytes: what a tile of many rows reads.
inline void spread_panel(const Linear& linear, int64_t p, uint8_t* out) {
  if (linear.kind == PG_KIND_INT8) spread_groups<true, false>(linear, linear.panel(p), out);
  else if (linear.has_zero_points) spread_groups<false, true>(linear, linear.panel(p), out);
  else spread_groups<false, false>(linear, linear.panel(p), out);
}

}  // namespace pageglass
