// Products of activation rows with packed weights, one tile of rows and a panel of 32 columns at a time.
//
// A result depends on its row and its column only: integers add up exactly, and floats are added in the order
// of the groups (int8, Q4) or of the inputs (bfloat16, float32), whatever the tile. So a sequence gets the same
// bits alone and in any batch.
//
// With s, z the scale and zero point of a column's group and a the scale of a row's group, a group adds
// (codes - z) . integers * (s * a). The whole part of z is subtracted from the codes, which are then signed, so the
// integers are multiplied as 128 more than they are: the constant that this adds, -128 times the sum of a column's
// codes, is where the integer accumulator starts, and costs nothing. What is left of z, at most half a code, times
// the row's scaled sum, is one bfloat16 product for two groups. That spares one in eleven of the instructions that
// take the multipliers' time. A single tile of rows works on codes as they lie: integers are exact either way.
//
// Four-bit codes are spread to bytes once per panel when there are rows enough to share them. While the first
// tile of a panel is computed, the next panel is on its way from memory.

#pragma once

#include <utility>

#include "activations.h"
#include "linear.h"
#include "spread.h"

namespace pageglass {

// Rows of a tile: as many as leave registers for the weights.
constexpr int kInt8TileRows = kIsWide ? 6 : 2;
constexpr int kFloatTileRows = kIsWide ? 12 : 4;
// So few rows that every tile spreads a panel's codes in registers (with 576 inputs 0.80 of the time for 7 rows, 0.95
// for 12, as long for 16).
constexpr int kDirectRows = 2 * kInt8TileRows;
constexpr int kStreamedRows = 4;  // so few that a panel is read as fast as it comes

// What a tile asks the memory for while it computes: `bytes` per group, from `data` on.
struct Ahead {
  const uint8_t* data = nullptr;
  int64_t bytes = 0;
  void fetch(int64_t g) const {
    for (int64_t i = 0; i < bytes; i += 64)
      _mm_prefetch(reinterpret_cast<const char*>(data + g * bytes + i), _MM_HINT_T1);
  }
};

inline Ints broadcast_word(const void* p) { return broadcast_int(read_as<int32_t>(static_cast<const uint8_t*>(p))); }

// R rows of integers.
struct IntegerRows {
  const uint8_t* integers;
  const int32_t* sums;  // (rows, num_groups)
  int64_t stride, num_groups;
};

// Reads a panel that `spread_panel` made.
struct SpreadPanel {
  const Linear& linear;
  const uint8_t* data;
  const uint8_t* group(int64_t g) const { return data + g * kSpreadGroupBytes; }

  template <int R>
  void multiply(const IntegerRows& rows, int64_t g, Ints (&acc)[R][2]) const {
    const uint8_t *codes = group(g), *a = rows.integers + g * kGroup;
    const Ints start0 = load_ints(codes + kSpreadStart), start1 = load_ints(codes + kSpreadStart + 64);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      acc[r][0] = start0;
      acc[r][1] = start1;
    }
#pragma GCC unroll 8
    for (int step = 0; step < 8; step++) {
      const Ints b0 = load_ints(codes + step * 128), b1 = load_ints(codes + step * 128 + 64);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const Ints word = broadcast_word(a + r * rows.stride + step * 4);
        acc[r][0] = dot_u8_s8(acc[r][0], word, b0);
        acc[r][1] = dot_u8_s8(acc[r][1], word, b1);
      }
    }
  }
  Floats scale(int64_t g, int half) const {
    return load(reinterpret_cast<const float*>(group(g) + kSpreadScale) + half * kLanes);
  }
  Ints rest(int64_t g, int half) const { return load_ints(group(g) + kSpreadRest + half * 64); }
};

// Reads a panel of int8 codes where it lies.
struct Int8Panel {
  const Linear& linear;
  const uint8_t* data;
  const uint8_t* group(int64_t g) const { return data + g * (kInt8CodeBytes + kScaleBytes); }

  template <int R>
  void multiply(const IntegerRows& rows, int64_t g, Ints (&acc)[R][2]) const {
    const uint8_t* codes = group(g);
    const uint8_t* a = rows.integers + g * kGroup;
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = broadcast_int(-128 * rows.sums[r * rows.num_groups + g]);
#pragma GCC unroll 8
    for (int step = 0; step < 8; step++) {
      const Ints b0 = load_ints(codes + step * 128), b1 = load_ints(codes + step * 128 + 64);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const Ints word = broadcast_word(a + r * rows.stride + step * 4);
        acc[r][0] = dot_u8_s8(acc[r][0], b0, word);
        acc[r][1] = dot_u8_s8(acc[r][1], b1, word);
      }
    }
  }
  Floats scale(int64_t g, int half) const {
    return load_f16(reinterpret_cast<const uint16_t*>(group(g) + kInt8CodeBytes) + half * kLanes);
  }
  Ints rest(int64_t, int) const { return broadcast_int(0); }
};

// Reads a panel of four-bit codes where it lies.
template <bool HasZeroPoints>
struct Q4Panel {
  const Linear& linear;
  const uint8_t* data;
  const uint8_t* group(int64_t g) const { return data + g * (kQ4CodeBytes + kScaleBytes * (HasZeroPoints ? 2 : 1)); }

  template <int R>
  void multiply(const IntegerRows& rows, int64_t g, Ints (&acc)[R][2]) const {
    const uint8_t* codes = group(g);
    const uint8_t* a = rows.integers + g * kGroup;
    const Ints low = broadcast_int(0x0f0f0f0f);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      acc[r][0] = acc[r][1] =
          broadcast_int(HasZeroPoints ? 0 : -linear.zero_point * rows.sums[r * rows.num_groups + g]);
    }
#pragma GCC unroll 4
    for (int step = 0; step < 4; step++) {
      const Ints c0 = load_ints(codes + step * 128), c1 = load_ints(codes + step * 128 + 64);
      const Ints l0 = and_bits(c0, low), l1 = and_bits(c1, low);
      const Ints h0 = and_bits(shift_right_16bit(c0, 4), low), h1 = and_bits(shift_right_16bit(c1, 4), low);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const Ints first = broadcast_word(a + r * rows.stride + step * 4);
        const Ints second = broadcast_word(a + r * rows.stride + 16 + step * 4);
        acc[r][0] = dot_u8_s8(dot_u8_s8(acc[r][0], l0, first), h0, second);
        acc[r][1] = dot_u8_s8(dot_u8_s8(acc[r][1], l1, first), h1, second);
      }
    }
    if constexpr (HasZeroPoints) {
      const Ints z0 = read_zero_points(codes, 0).whole, z1 = read_zero_points(codes, 1).whole;
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const Ints sum = broadcast_int(rows.sums[r * rows.num_groups + g]);
        acc[r][0] = sub_ints(acc[r][0], mul_ints(z0, sum));
        acc[r][1] = sub_ints(acc[r][1], mul_ints(z1, sum));
      }
    }
  }
  Floats scale(int64_t g, int half) const {
    return load_f16(reinterpret_cast<const uint16_t*>(group(g) + kQ4CodeBytes) + half * kLanes);
  }
  Ints rest(int64_t g, int half) const {
    const Floats next = g + 1 < linear.num_groups ? read_zero_points(group(g + 1), half).rest : broadcast(0.0f);
    return bf16_pairs(read_zero_points(group(g), half).rest, next);
  }
};

// Rows [first, last).
struct RowRange {
  int64_t first, last;
  int64_t size() const { return last - first; }
};

// What the tiles of a panel have in common. `panel`: where it lies, or lies spread.
struct TileTask {
  const Activations& x;
  const Linear& linear;
  const uint8_t* panel;
  Ahead ahead;
};

// The tile of R rows from `row` on of an int8 product, to out (R, kPanel).
template <class Panel, bool HasZeroPoints, int R>
void int8_tile(const TileTask& task, int64_t row, float* out) {
  const Activations& x = task.x;
  const Panel panel{task.linear, task.panel};
  const int64_t num_groups = panel.linear.num_groups, sums_stride = x.num_pairs() * 2;
  const IntegerRows rows{x.row<uint8_t>(row), x.sums(row), x.width(), num_groups};
  const float* scales = x.scales(row);
  const uint16_t* scaled_sums = x.scaled_sums(row);
  Floats total[R][2];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) total[r][0] = total[r][1] = broadcast(0.0f);
  const auto add_group = [&](int64_t g) {
    task.ahead.fetch(g);
    Ints acc[R][2];
    panel.template multiply<R>(rows, g, acc);
    const Floats s0 = panel.scale(g, 0), s1 = panel.scale(g, 1);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const Floats scale = broadcast(scales[r * num_groups + g]);
      total[r][0] = fma(to_floats(acc[r][0]), mul(s0, scale), total[r][0]);
      total[r][1] = fma(to_floats(acc[r][1]), mul(s1, scale), total[r][1]);
    }
  };
  for (int64_t g = 0; g < num_groups; g += 2) {
    add_group(g);
    if (g + 1 < num_groups) add_group(g + 1);
    if constexpr (HasZeroPoints) {
      const Ints rest0 = panel.rest(g, 0), rest1 = panel.rest(g, 1);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const Ints sums = broadcast_word(scaled_sums + r * sums_stride + g);
        total[r][0] = dot_bf16(total[r][0], rest0, sums);
        total[r][1] = dot_bf16(total[r][1], rest1, sums);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    store(out + r * kPanel, total[r][0]);
    store(out + r * kPanel + kLanes, total[r][1]);
  }
}

// The same for pairs of bfloat16 or for float32.
template <bool IsBf16, int R>
void float_tile(const TileTask& task, int64_t row, float* out) {
  const Activations& x = task.x;
  const uint8_t* panel = task.panel;
  const int64_t num_inputs = task.linear.num_groups * kGroup;
  Floats total[R][2];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) total[r][0] = total[r][1] = broadcast(0.0f);
  if constexpr (IsBf16) {
    const auto* a = reinterpret_cast<const uint8_t*>(x.row<uint16_t>(row));
    const int64_t stride = x.width() * 2;
    for (int64_t k = 0; k < num_inputs; k += 2, panel += 128) {
      const Ints b0 = load_ints(panel), b1 = load_ints(panel + 64);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        const Ints pair = broadcast_int(read_as<int32_t>(a + r * stride + k * 2));
        total[r][0] = dot_bf16(total[r][0], b0, pair);
        total[r][1] = dot_bf16(total[r][1], b1, pair);
      }
    }
  } else {
    const float* a = x.row<float>(row);
    const int64_t stride = x.width();
    for (int64_t k = 0; k < num_inputs; k++, panel += 128) {
      const Floats b0 = load(reinterpret_cast<const float*>(panel)),
                   b1 = load(reinterpret_cast<const float*>(panel) + kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        const Floats number = broadcast(a[r * stride + k]);
        total[r][0] = fma(b0, number, total[r][0]);
        total[r][1] = fma(b1, number, total[r][1]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    store(out + r * kPanel, total[r][0]);
    store(out + r * kPanel + kLanes, total[r][1]);
  }
}

// ---- the right tile -----------------------------------------------------------------------------------------

using TileFunction = void (*)(const TileTask& task, int64_t row, float* out);

// functions[r - 1] computes a tile of r rows, r in [1, max_rows].
struct TileFunctions {
  const TileFunction* functions;
  int max_rows;
};

template <class Panel, bool HasZeroPoints, int... R>
TileFunctions int8_tiles(std::integer_sequence<int, R...>) {
  static constexpr TileFunction functions[] = {int8_tile<Panel, HasZeroPoints, R + 1>...};
  return {functions, sizeof...(R)};
}
template <bool IsBf16, int... R>
TileFunctions float_tiles(std::integer_sequence<int, R...>) {
  static constexpr TileFunction functions[] = {float_tile<IsBf16, R + 1>...};
  return {functions, sizeof...(R)};
}

inline TileFunctions tiles_of(const Linear& linear, bool is_spread) {
  constexpr std::make_integer_sequence<int, kInt8TileRows> int8_rows;
  constexpr std::make_integer_sequence<int, kFloatTileRows> float_rows;
  if (linear.kind == PG_KIND_BF16) return float_tiles<true>(float_rows);
  if (linear.kind == PG_KIND_F32) return float_tiles<false>(float_rows);
  if (is_spread && linear.has_zero_points) return int8_tiles<SpreadPanel, true>(int8_rows);
  if (is_spread) return int8_tiles<SpreadPanel, false>(int8_rows);
  if (linear.kind == PG_KIND_INT8) return int8_tiles<Int8Panel, false>(int8_rows);
  if (linear.has_zero_points) return int8_tiles<Q4Panel<true>, true>(int8_rows);
  return int8_tiles<Q4Panel<false>, false>(int8_rows);
}

// The given rows of x times panel `p` of a weight; sink(row, half, sums) takes 16 columns of a row. `scratch`:
// num_groups * kSpreadGroupBytes bytes of the thread's own.
template <class Sink>
void multiply_panel(const Activations& x, RowRange rows, const Linear& linear, int64_t p, uint8_t* scratch,
                    const Sink& sink) {
  const int64_t num_rows = rows.size();
  const bool is_int8 = x.number() == Number::kInt8, is_spread = is_int8 && x.is_shifted();
  if (is_spread) spread_panel(linear, p, scratch);
  TileTask task{x, linear, is_spread ? scratch : linear.panel(p), {}};
  // With few rows the memory is all there is to wait for, and reads in order need no help.
  if (is_int8 && num_rows > kStreamedRows && p + 1 < linear.num_panels)
    task.ahead = {linear.panel(p + 1), linear.group_bytes()};
  const TileFunctions tiles = tiles_of(linear, is_spread);
  // As few tiles as there must be, of about equal heights: flat ones are slow.
  const int64_t num_tiles = divide_up(num_rows, tiles.max_rows);
  alignas(64) float out[kFloatTileRows * kPanel];
  for (int64_t t = 0, row = rows.first; t < num_tiles; t++) {
    const int64_t end = rows.first + num_rows * (t + 1) / num_tiles;
    tiles.functions[end - row - 1](task, row, out);
    for (const float* sums = out; row < end; row++, sums += kPanel) sink(row, load(sums), load(sums + kLanes));
    task.ahead = {};
  }
}

// Row `output` of a weight as floats: the embedding of a token.
inline void read_output(const Linear& linear, int64_t output, float* out) {
  const int64_t column = output % kPanel;
  for (int64_t g = 0; g < linear.num_groups; g++, out += kGroup) {
    const uint8_t* group = linear.panel(output / kPanel) + g * linear.group_bytes();
    for (int i = 0; i < kGroup; i++) {
      if (linear.kind == PG_KIND_F32) out[i] = reinterpret_cast<const float*>(group)[i * kPanel + column];
      else if (linear.kind == PG_KIND_BF16)
        out[i] = bf16_to_float(reinterpret_cast<const uint16_t*>(group)[(i / 2 * kPanel + column) * 2 + i % 2]);
      else if (linear.kind == PG_KIND_INT8) {
        const float scale = f16_to_float(reinterpret_cast<const uint16_t*>(group + kInt8CodeBytes)[column]);
        out[i] = (float)((int)group[i / 4 * 128 + column * 4 + i % 4] - 128) * scale;
      } else {
        const auto* scales = reinterpret_cast<const uint16_t*>(group + kQ4CodeBytes);
        const uint8_t byte = group[i % 16 / 4 * 128 + column * 4 + i % 4];
        const auto* zero_points = reinterpret_cast<const int16_t*>(scales + kPanel);
        const float zero_point = linear.has_zero_points ? zero_points[column] / 256.0f : (float)linear.zero_point;
        out[i] = ((float)(i < 16 ? byte & 15 : byte >> 4) - zero_point) * f16_to_float(scales[column]);
      }
    }
  }
}

}  // namespace pageglass
