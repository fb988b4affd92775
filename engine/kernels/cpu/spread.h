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

// Put the signed codes of a group where a spread panel has them; 16 columns are every other vector.
inline void spread_codes(const Linear& linear, const uint8_t* group, uint8_t* out) {
  if (linear.kind == PG_KIND_INT8) {
    const Ints flip = broadcast_int((int32_t)0x80808080u);
    for (int64_t i = 0; i < kInt8CodeBytes; i += 64) store_ints(out + i, xor_bits(load_ints(group + i), flip));
    return;
  }
  const Ints low = broadcast_int(0x0f0f0f0f);
  for (int half = 0; half < 2; half++) {
    Ints zero = broadcast_int(linear.zero_point * 0x01010101);
    if (linear.has_zero_points) {  // the same byte for all four inputs of a column
      const Ints whole = and_bits(read_zero_points(group, half).whole, broadcast_int(0xff));
      zero = mul_ints(whole, broadcast_int(0x01010101));
    }
    for (int64_t i = half * 64; i < kQ4CodeBytes; i += 128) {
      const Ints codes = load_ints(group + i);
      store_ints(out + i, sub_bytes(and_bits(codes, low), zero));
      store_ints(out + kQ4CodeBytes + i, sub_bytes(and_bits(shift_right_16bit(codes, 4), low), zero));
    }
  }
}

// A panel of int8 or Q4 codes as signed bytes: what a tile of many rows reads.
inline void spread_panel(const Linear& linear, int64_t p, uint8_t* out) {
  const uint8_t* group = linear.panel(p);
  const Ints ones = broadcast_int(0x01010101);
  for (int64_t g = 0; g < linear.num_groups; g++, group += linear.group_bytes(), out += kSpreadGroupBytes) {
    spread_codes(linear, group, out);
    const uint8_t* scales = group + (linear.kind == PG_KIND_Q4 ? kQ4CodeBytes : kInt8CodeBytes);
    for (int half = 0; half < 2; half++) {
      Ints sum = broadcast_int(0);
      for (int step = 0; step < 8; step++) sum = dot_u8_s8(sum, ones, load_ints(out + step * 128 + half * 64));
      store_ints(out + kSpreadStart + half * 64, sub_ints(broadcast_int(0), shift_left<7>(sum)));
      store(reinterpret_cast<float*>(out + kSpreadScale) + half * kLanes,
            load_f16(reinterpret_cast<const uint16_t*>(scales) + half * kLanes));
      if (!linear.has_zero_points || g % 2 == 1) continue;
      const bool is_last = g + 1 == linear.num_groups;
      const Floats next = is_last ? broadcast(0.0f) : read_zero_points(group + linear.group_bytes(), half).rest;
      store_ints(out + kSpreadRest + half * 64, bf16_pairs(read_zero_points(group, half).rest, next));
    }
  }
}

}  // namespace pageglass
