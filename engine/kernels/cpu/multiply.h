// Products of activation rows with packed weights, one tile of rows and a panel of 32 columns at a time.
//
// A result depends on its row and its column only: integers add up exactly, and floats are added in the order
// of the groups (int8, Q4) or of the inputs (bfloat16, float32), whatever the tile. So a sequence gets the same
// bits alone and in any batch.
//
// int8 x u8: with s, m the scale and minimum of a column's group and a, u the scale of a row's group and
// the scaled sum of its integers, a group adds (codes . integers) * (s * a) + m * u. Where codes count from a
// zero point z, the sum of integers times -z is where the integer accumulator starts, which costs nothing.
//
// Four-bit codes are spread to bytes once per panel when there are rows enough to share them. While the first
// tile of a panel is computed, the next panel is on its way from memory.

#pragma once

#include "activations.h"
#include "linear.h"

namespace pageglass {

// Rows of a tile: as many as leave registers for the weights.
constexpr int kInt8TileRows = kIsWide ? 6 : 2;
constexpr int kFloatTileRows = kIsWide ? 12 : 4;
constexpr int kDirectRows = kInt8TileRows;  // one tile: four-bit codes are spread in registers
constexpr int kStreamedRows = 4;               // so few that a panel is read as fast as it comes

constexpr int64_t kSpreadScaleBytes = kPanel * 4;
constexpr int64_t kSpreadGroupBytes = kInt8CodeBytes + 2 * kSpreadScaleBytes;  // codes, scales, minima

// A panel of int8 or Q4 codes as bytes with float32 scales: what a tile of many rows reads.
inline void spread_panel(const Linear& linear, int64_t p, uint8_t* out) {
  const Ints low = broadcast_int(0x0f0f0f0f);
  const uint8_t* group = linear.panel(p);
  for (int64_t g = 0; g < linear.num_groups; g++, group += linear.group_bytes(), out += kSpreadGroupBytes) {
    const uint8_t* scales;
    if (linear.kind == PG_KIND_Q4) {
      scales = group + kQ4CodeBytes;
      for (int64_t i = 0; i < kQ4CodeBytes; i += 64) {
        const Ints codes = load_ints(group + i);
        store_ints(out + i, and_bits(codes, low));
        store_ints(out + kQ4CodeBytes + i, and_bits(shift_right_16bit(codes, 4), low));
      }
    } else {
      scales = group + kInt8CodeBytes;
      for (int64_t i = 0; i < kInt8CodeBytes; i += 64) store_ints(out + i, load_ints(group + i));
    }
    auto* spread = reinterpret_cast<float*>(out + kInt8CodeBytes);
    for (int half = 0; half < 2; half++) {
      const auto* f16 = reinterpret_cast<const uint16_t*>(scales) + half * kLanes;
      store(spread + half * kLanes, load_f16(f16));
      if (linear.has_minimum) store(spread + kPanel + half * kLanes, load_f16(f16 + kPanel));
    }
  }
}

// What a tile asks the memory for while it computes: `bytes` per group, from `data` on.
struct Ahead {
  const uint8_t* data = nullptr;
  int64_t bytes = 0;
  void fetch(int64_t g) const {
    for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch(reinterpret_cast<const char*>(data + g * bytes + i), _MM_HINT_T1);
  }
};

inline Ints broadcast_word(const int8_t* p) { return broadcast_int(read_as<int32_t>(reinterpret_cast<const uint8_t*>(p))); }

// Reads a panel that `spread_panel` made.
struct SpreadPanel {
  const uint8_t* data;
  static constexpr int kStepInputs = 4;
  const uint8_t* group(int64_t g) const { return data + g * kSpreadGroupBytes; }
  template <int R>
  static inline void add_codes(const uint8_t* group, const int8_t* a, int64_t stride, Ints (&acc)[R][2]) {
#pragma GCC unroll 8
    for (int step = 0; step < 8; step++) {
      const Ints b0 = load_ints(group + step * 128), b1 = load_ints(group + step * 128 + 64);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const Ints word = broadcast_word(a + r * stride + step * 4);
        acc[r][0] = dot_u8_s8(acc[r][0], b0, word);
        acc[r][1] = dot_u8_s8(acc[r][1], b1, word);
      }
    }
  }
  static inline Floats scale(const uint8_t* group, int half) {
    return load(reinterpret_cast<const float*>(group + kInt8CodeBytes) + half * kLanes);
  }
  static inline Floats minimum(const uint8_t* group, int half) {
    return load(reinterpret_cast<const float*>(group + kInt8CodeBytes) + kPanel + half * kLanes);
  }
};

// Reads a panel of int8 codes where it lies.
struct Int8Panel {
  const uint8_t* data;
  const uint8_t* group(int64_t g) const { return data + g * (kInt8CodeBytes + kScaleBytes); }
  template <int R>
  static inline void add_codes(const uint8_t* group, const int8_t* a, int64_t stride, Ints (&acc)[R][2]) {
    SpreadPanel::add_codes<R>(group, a, stride, acc);
  }
  static inline Floats scale(const uint8_t* group, int half) {
    return load_f16(reinterpret_cast<const uint16_t*>(group + kInt8CodeBytes) + half * kLanes);
  }
  static inline Floats minimum(const uint8_t*, int) { return broadcast(0.0f); }
};

// Reads a panel of four-bit codes where it lies.
template <bool HasMinimum>
struct Q4Panel {
  const uint8_t* data;
  const uint8_t* group(int64_t g) const { return data + g * (kQ4CodeBytes + kScaleBytes * (HasMinimum ? 2 : 1)); }
  template <int R>
  static inline void add_codes(const uint8_t* group, const int8_t* a, int64_t stride, Ints (&acc)[R][2]) {
    const Ints low = broadcast_int(0x0f0f0f0f);
#pragma GCC unroll 4
    for (int step = 0; step < 4; step++) {
      const Ints c0 = load_ints(group + step * 128), c1 = load_ints(group + step * 128 + 64);
      const Ints l0 = and_bits(c0, low), l1 = and_bits(c1, low);
      const Ints h0 = and_bits(shift_right_16bit(c0, 4), low), h1 = and_bits(shift_right_16bit(c1, 4), low);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const Ints first = broadcast_word(a + r * stride + step * 4), second = broadcast_word(a + r * stride + 16 + step * 4);
        acc[r][0] = dot_u8_s8(dot_u8_s8(acc[r][0], l0, first), h0, second);
        acc[r][1] = dot_u8_s8(dot_u8_s8(acc[r][1], l1, first), h1, second);
      }
    }
  }
  static inline Floats scale(const uint8_t* group, int half) {
    return load_f16(reinterpret_cast<const uint16_t*>(group + kQ4CodeBytes) + half * kLanes);
  }
  static inline Floats minimum(const uint8_t* group, int half) {
    return load_f16(reinterpret_cast<const uint16_t*>(group + kQ4CodeBytes + kScaleBytes) + half * kLanes);
  }
};

// The tile of R rows from `row` on of an int8 product; sink(row, half, sums) takes 16 columns of one row.
template <int R, bool HasMinimum, class Panel, class Sink>
inline void int8_tile(const Activations& x, int64_t row, const Panel& panel, const Linear& linear, const Ahead& ahead, const Sink& sink) {
  const int64_t num_groups = linear.num_groups;
  const int32_t zero_point = linear.zero_point;
  const int64_t stride = x.width();
  const int8_t* a = x.row<int8_t>(row);
  const float* scales = x.scales(row);
  const float* scaled_sums = x.scaled_sums(row);
  const int32_t* sums = x.sums(row);
  Floats total[R][2];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) total[r][0] = total[r][1] = broadcast(0.0f);
  for (int64_t g = 0; g < num_groups; g++) {
    const uint8_t* group = panel.group(g);
    ahead.fetch(g);
    Ints acc[R][2];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      acc[r][0] = acc[r][1] = broadcast_int(HasMinimum ? 0 : -zero_point * sums[r * num_groups + g]);
    }
    Panel::template add_codes<R>(group, a + g * kGroup, stride, acc);
    const Floats s0 = Panel::scale(group, 0), s1 = Panel::scale(group, 1);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const Floats scale = broadcast(scales[r * num_groups + g]);
      total[r][0] = fma(to_floats(acc[r][0]), mul(s0, scale), total[r][0]);
      total[r][1] = fma(to_floats(acc[r][1]), mul(s1, scale), total[r][1]);
    }
    if (HasMinimum) {
      const Floats m0 = Panel::minimum(group, 0), m1 = Panel::minimum(group, 1);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const Floats sum = broadcast(scaled_sums[r * num_groups + g]);
        total[r][0] = fma(m0, sum, total[r][0]);
        total[r][1] = fma(m1, sum, total[r][1]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    sink(row + r, 0, total[r][0]);
    sink(row + r, 1, total[r][1]);
  }
}

// The same for pairs of bfloat16 or for float32.
template <int R, bool IsBf16, class Sink>
inline void float_tile(const Activations& x, int64_t row, const uint8_t* panel, int64_t num_inputs, const Sink& sink) {
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
      const Floats b0 = load(reinterpret_cast<const float*>(panel)), b1 = load(reinterpret_cast<const float*>(panel) + kLanes);
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
    sink(row + r, 0, total[r][0]);
    sink(row + r, 1, total[r][1]);
  }
}

// Call tile.template run<R>(row) for all rows in [first, last): tiles of MaxRows, then one of what is left.
template <int MaxRows, class Tile>
inline void for_tiles(int64_t first, int64_t last, const Tile& tile) {
  int64_t row = first;
  for (; row + MaxRows <= last; row += MaxRows) tile.template run<MaxRows>(row);
  if constexpr (MaxRows > 1) {
    if (row < last) for_tiles<MaxRows - 1>(row, last, tile);
  }
}

template <bool HasMinimum, class Panel, class Sink>
struct Int8Tile {
  const Activations& x;
  const Panel& panel;
  const Linear& linear;
  Ahead ahead;
  int64_t first;
  const Sink& sink;
  template <int R> void run(int64_t row) const {
    int8_tile<R, HasMinimum>(x, row, panel, linear, row == first ? ahead : Ahead{}, sink);
  }
};

template <bool IsBf16, class Sink>
struct FloatTile {
  const Activations& x;
  const Linear& linear;
  int64_t p;
  const Sink& sink;
  template <int R> void run(int64_t row) const {
    float_tile<R, IsBf16>(x, row, linear.panel(p), linear.num_groups * kGroup, sink);
  }
};

template <bool HasMinimum, class Panel, class Sink>
void run_int8_tiles(const Activations& x, int64_t first, int64_t last, const Panel& panel, const Linear& linear, int64_t p, const Sink& sink) {
  Ahead ahead;  // with few rows the memory is all there is to wait for, and reads in order need no help
  if (last - first > kStreamedRows && p + 1 < linear.num_panels) ahead = {linear.panel(p + 1), linear.group_bytes()};
  for_tiles<kInt8TileRows>(first, last, Int8Tile<HasMinimum, Panel, Sink>{x, panel, linear, ahead, first, sink});
}

// Rows [first, last) of x times panel `p` of a weight; sink(row, half, sums) takes 16 columns of a row.
// `scratch`: num_groups * kSpreadGroupBytes bytes of the thread's own.
template <class Sink>
void multiply_panel(const Activations& x, int64_t first, int64_t last, const Linear& linear, int64_t p, uint8_t* scratch, const Sink& sink) {
  if (linear.kind == PG_KIND_BF16) {
    for_tiles<kFloatTileRows>(first, last, FloatTile<true, Sink>{x, linear, p, sink});
  } else if (linear.kind == PG_KIND_F32) {
    for_tiles<kFloatTileRows>(first, last, FloatTile<false, Sink>{x, linear, p, sink});
  } else if (last - first > kDirectRows) {
    spread_panel(linear, p, scratch);
    const SpreadPanel panel{scratch};
    if (linear.has_minimum) run_int8_tiles<true>(x, first, last, panel, linear, p, sink);
    else run_int8_tiles<false>(x, first, last, panel, linear, p, sink);
  } else if (linear.kind == PG_KIND_INT8) {
    run_int8_tiles<false>(x, first, last, Int8Panel{linear.panel(p)}, linear, p, sink);
  } else if (linear.has_minimum) {
    run_int8_tiles<true>(x, first, last, Q4Panel<true>{linear.panel(p)}, linear, p, sink);
  } else {
    run_int8_tiles<false>(x, first, last, Q4Panel<false>{linear.panel(p)}, linear, p, sink);
  }
}

// Row `output` of a weight as floats: the embedding of a token.
inline void read_output(const Linear& linear, int64_t output, float* out) {
  const int64_t column = output % kPanel;
  for (int64_t g = 0; g < linear.num_groups; g++, out += kGroup) {
    const uint8_t* group = linear.panel(output / kPanel) + g * linear.group_bytes();
    for (int i = 0; i < kGroup; i++) {
      if (linear.kind == PG_KIND_F32) out[i] = reinterpret_cast<const float*>(group)[i * kPanel + column];
      else if (linear.kind == PG_KIND_BF16) out[i] = bf16_to_float(reinterpret_cast<const uint16_t*>(group)[(i / 2 * kPanel + column) * 2 + i % 2]);
      else if (linear.kind == PG_KIND_INT8) {
        const float scale = f16_to_float(reinterpret_cast<const uint16_t*>(group + kInt8CodeBytes)[column]);
        out[i] = (float)((int)group[i / 4 * 128 + column * 4 + i % 4] - 128) * scale;
      } else {
        const auto* scales = reinterpret_cast<const uint16_t*>(group + kQ4CodeBytes);
        const uint8_t byte = group[i % 16 / 4 * 128 + column * 4 + i % 4];
        const float code = (float)((i < 16 ? byte & 15 : byte >> 4) - linear.zero_point);
        out[i] = code * f16_to_float(scales[column]);
        if (linear.has_minimum) out[i] += f16_to_float(scales[kPanel + column]);
      }
    }
  }
}

}  // namespace pageglass
