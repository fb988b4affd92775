// A linear layer's weight, packed for multiplication.
//
// Columns (outputs) are grouped in panels of 32, rows (inputs) in groups of 32. A panel is one stream:
//   Q4      per group: 512 bytes of codes, 32 float16 scales, and 32 int16 zero points where the file has minima
//   INT8    per group: 1,024 bytes of codes plus 128, 32 float16 scales
//   BF16    per pair of inputs: 32 pairs
//   F32     per input: 32 floats
// Codes lie as VNNI wants them: four inputs of one column are one 32-bit word; 16 columns a vector. A byte of
// Q4 holds inputs j and j + 16 of a group in its halves, as ggml's blocks do.
//
// A number of Q4 is scale * (code - zero point). The file's minimum becomes a zero point in steps of 1/256 of a code:
// its whole part goes into integer arithmetic, and what is left is small enough for bfloat16.
//
// GATE_UP interleaves two weights: a panel is 16 columns of the gate and the same 16 of the other, so that
// both factors of a product leave the same tile.

#pragma once

#include <algorithm>
#include <string>

#include "memory.h"
#include "simd.h"
#include "thread_pool.h"

namespace pageglass {

constexpr int64_t kQ4CodeBytes = kGroup * kPanel / 2;
constexpr int64_t kInt8CodeBytes = kGroup * kPanel;
constexpr int64_t kScaleBytes = kPanel * 2;
constexpr uint16_t kF16NaN = 0x7e00;
constexpr float kFarthestZeroPoint = 100.0f;  // code - zero point must fit into int8

struct Linear {
  PgKind kind = PG_KIND_F32;
  int64_t num_outputs = 0, num_inputs = 0;  // as the model counts them
  int64_t num_groups = 0, num_panels = 0;
  bool has_zero_points = false;  // Q4_1; otherwise all codes count from `zero_point`
  int32_t zero_point = 0;
  Memory data;
  LineVector<float> bias;  // empty, or padded to whole panels

  bool is_set() const { return num_outputs > 0; }
  int64_t width() const { return num_panels * kPanel; }  // outputs, padded
  int64_t group_bytes() const {
    switch (kind) {
      case PG_KIND_Q4: return kQ4CodeBytes + kScaleBytes * (has_zero_points ? 2 : 1);
      case PG_KIND_INT8: return kInt8CodeBytes + kScaleBytes;
      case PG_KIND_BF16: return kGroup * kPanel * 2;
      default: return kGroup * kPanel * 4;
    }
  }
  int64_t panel_bytes() const { return num_groups * group_bytes(); }
  uint8_t* panel(int64_t p) const { return data.as<uint8_t>() + p * panel_bytes(); }
};

inline int64_t bytes_per_group(int32_t storage) {
  switch (storage) {
    case PG_F32: return 128;
    case PG_F16:
    case PG_BF16: return 64;
    case PG_Q4_0: return 18;
    case PG_Q4_1: return 20;
    case PG_Q8_0: return 34;
    default: throw BadArgument("unknown storage of a tensor");
  }
}

inline bool is_block_format(int32_t storage) { return storage >= PG_Q4_0; }

inline float f16_to_float(uint16_t x) { return _cvtsh_ss(x); }
inline uint16_t float_to_f16(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }

// Where row `r` of a tensor lies, in the order in which rotary pairs are (i, i + head_dim / 2).
inline int64_t source_row(const PgTensor& tensor, int64_t r) {
  if (tensor.rotary_heads == 0) return r;
  const int64_t head_dim = tensor.rows / tensor.rotary_heads, half = head_dim / 2;
  const int64_t head = r / head_dim, i = r % head_dim;
  return head * head_dim + (i < half ? 2 * i : 2 * (i - half) + 1);
}

inline const uint8_t* row_of(const PgTensor& tensor, int64_t r) {
  const int64_t columns = tensor.columns;
  int64_t row_bytes;
  if (is_block_format(tensor.storage)) row_bytes = columns / kGroup * bytes_per_group(tensor.storage);
  else row_bytes = columns * (tensor.storage == PG_F32 ? 4 : 2);
  return static_cast<const uint8_t*>(tensor.data) + source_row(tensor, r) * row_bytes;
}

// Numbers [32 group, 32 group + 32) of a row as floats, zeros behind the row's end.
inline void read_group(const PgTensor& tensor, const uint8_t* row, int64_t group, float* out) {
  const int64_t count = std::min<int64_t>(kGroup, tensor.columns - group * kGroup);
  const uint8_t* block = row + group * bytes_per_group(tensor.storage);
  for (int64_t i = 0; i < kGroup; i++) {
    if (i >= count) out[i] = 0;
    else if (tensor.storage == PG_F32) out[i] = read_as<float>(block + 4 * i);
    else if (tensor.storage == PG_F16) out[i] = f16_to_float(read_as<uint16_t>(block + 2 * i));
    else if (tensor.storage == PG_BF16) out[i] = bf16_to_float(read_as<uint16_t>(block + 2 * i));
    else if (tensor.storage == PG_Q8_0) out[i] = f16_to_float(read_as<uint16_t>(block)) * (float)(int8_t)block[2 + i];
    else {
      const bool has_minimum = tensor.storage == PG_Q4_1;
      const uint8_t byte = block[(has_minimum ? 4 : 2) + i % 16];
      const float code = (float)(i < 16 ? byte & 15 : byte >> 4);
      const float scale = f16_to_float(read_as<uint16_t>(block));
      out[i] = has_minimum ? code * scale + f16_to_float(read_as<uint16_t>(block + 2)) : (code - 8) * scale;
    }
  }
}

// Put one column's group into its panel.
class GroupPacker {
 public:
  GroupPacker(const Linear& linear, const PgTensor& tensor) : linear_(linear), tensor_(tensor) {}

  void put(const uint8_t* row, int64_t group, uint8_t* panel_group, int64_t column) const {
    const uint8_t* block = row + group * bytes_per_group(tensor_.storage);
    if (linear_.kind == PG_KIND_Q4 && linear_.has_zero_points) {
      put_q4_1(block, panel_group, column);
    } else if (linear_.kind == PG_KIND_Q4) {
      put_words(block + 2, 4, panel_group, column, 0);
      std::memcpy(panel_group + kQ4CodeBytes + 2 * column, block, 2);
    } else if (linear_.kind == PG_KIND_INT8 && tensor_.storage == PG_Q8_0) {
      put_words(block + 2, 8, panel_group, column, 0x80808080u);
      std::memcpy(panel_group + kInt8CodeBytes + 2 * column, block, 2);
    } else {
      float numbers[kGroup];
      read_group(tensor_, row, group, numbers);
      put_numbers(numbers, panel_group, column);
    }
  }

 private:
  static void put_words(const uint8_t* codes, int num_words, uint8_t* panel_group, int64_t column, uint32_t flip) {
    for (int i = 0; i < num_words; i++) {
      const uint32_t word = read_as<uint32_t>(codes + 4 * i) ^ flip;
      std::memcpy(panel_group + i * 128 + column * 4, &word, 4);
    }
  }

  // code * scale + minimum as scale * (code - zero point). Groups whose minimum is far from 0, measured in their scale,
  // are rounded anew with a scale that reaches it: a constant group, say.
  static void put_q4_1(const uint8_t* block, uint8_t* panel_group, int64_t column) {
    const float minimum = f16_to_float(read_as<uint16_t>(block + 2));
    uint16_t stored = read_as<uint16_t>(block);
    const float scale = f16_to_float(stored);
    uint8_t codes[kGroup / 2];
    std::memcpy(codes, block + 4, sizeof codes);
    float kept = scale;
    if (std::fabs(minimum) > kFarthestZeroPoint * std::fabs(scale)) {
      stored = float_to_f16(std::copysign(std::fabs(minimum) / kFarthestZeroPoint, scale));
      if (std::fabs(f16_to_float(stored)) * kFarthestZeroPoint < std::fabs(minimum)) stored++;  // away from 0
      kept = f16_to_float(stored);
      const auto round_code = [&](int code) { return kept != 0 ? (int)std::nearbyint(code * scale / kept) : 0; };
      for (uint8_t& byte : codes) byte = (uint8_t)(round_code(byte & 15) | round_code(byte >> 4) << 4);
    }
    const bool is_finite = std::isfinite(kept) && std::isfinite(minimum);
    if (!is_finite) stored = kF16NaN;
    const float exact = is_finite && kept != 0 ? -minimum / kept * 256.0f : 0.0f;
    const auto zero_point = (int16_t)std::nearbyint(std::min(std::max(exact, -28000.0f), 28000.0f));
    put_words(codes, 4, panel_group, column, 0);
    std::memcpy(panel_group + kQ4CodeBytes + 2 * column, &stored, 2);
    std::memcpy(panel_group + kQ4CodeBytes + kScaleBytes + 2 * column, &zero_point, 2);
  }

  void put_numbers(const float* numbers, uint8_t* panel_group, int64_t column) const {
    if (linear_.kind == PG_KIND_F32) {
      for (int i = 0; i < kGroup; i++) reinterpret_cast<float*>(panel_group)[i * kPanel + column] = numbers[i];
    } else if (linear_.kind == PG_KIND_BF16) {
      auto* out = reinterpret_cast<uint16_t*>(panel_group);
      for (int i = 0; i < kGroup; i++) out[(i / 2 * kPanel + column) * 2 + i % 2] = float_to_bf16(numbers[i]);
    } else {
      put_int8(numbers, panel_group, column);
    }
  }

  static void put_int8(const float* numbers, uint8_t* panel_group, int64_t column) {
    float largest = 0;
    bool is_finite = true;
    for (int i = 0; i < kGroup; i++) {
      largest = std::max(largest, std::fabs(numbers[i]));
      is_finite = is_finite && std::isfinite(numbers[i]);
    }
    const uint16_t stored = is_finite ? float_to_f16(largest / 127.0f) : kF16NaN;
    const float scale = f16_to_float(stored);
    uint8_t codes[kGroup];
    for (int i = 0; i < kGroup; i++) {
      const float exact = scale > 0 ? numbers[i] / scale : 0.0f;
      codes[i] = (uint8_t)((int)std::nearbyint(std::min(std::max(exact, -127.0f), 127.0f)) + 128);
    }
    put_words(codes, 8, panel_group, column, 0);
    std::memcpy(panel_group + kInt8CodeBytes + 2 * column, &stored, 2);
  }

  const Linear& linear_;
  const PgTensor& tensor_;
};

inline void check_source(const PgTensor& tensor, int32_t kind) {
  if (tensor.data == nullptr || tensor.rows < 1 || tensor.columns < 1) throw BadArgument("an empty tensor");
  bytes_per_group(tensor.storage);
  if (is_block_format(tensor.storage) && tensor.columns % kGroup != 0) throw BadArgument("a row ends inside a block");
  if (kind == PG_KIND_Q4 && tensor.storage != PG_Q4_0 && tensor.storage != PG_Q4_1) {
    throw BadArgument("Q4 takes tensors that are stored in Q4_0 or Q4_1");
  }
  if (tensor.rotary_heads < 0 || (tensor.rotary_heads > 0 && tensor.rows % (2 * tensor.rotary_heads) != 0)) {
    throw BadArgument("rows do not divide into rotary pairs of so many heads");
  }
}

// One panel of a weight, `columns_each` columns of each tensor.
inline void pack_panel(const Linear& linear, const PgTensor* tensors, int64_t columns_each, int64_t p) {
  for (int64_t c = 0; c < kPanel; c++) {
    const PgTensor& tensor = tensors[c / columns_each];
    const int64_t r = p * columns_each + c % columns_each;
    if (r >= tensor.rows) continue;  // padding: codes and scales of zero
    const GroupPacker packer(linear, tensor);
    const uint8_t* row = row_of(tensor, r);
    for (int64_t g = 0; g < linear.num_groups; g++) packer.put(row, g, linear.panel(p) + g * linear.group_bytes(), c);
  }
}

// Pack one tensor (rows = outputs), or two of the same shape and storage interleaved by 16 columns.
inline Linear pack_linear(ThreadPool& pool, PgKind kind, const PgTensor* tensors, int num_tensors) {
  const PgTensor& first = tensors[0];
  for (int i = 0; i < num_tensors; i++) {
    check_source(tensors[i], kind);
    if (tensors[i].rows != first.rows || tensors[i].columns != first.columns || tensors[i].storage != first.storage) {
      throw BadArgument("interleaved tensors differ in shape or storage");
    }
  }
  Linear linear;
  linear.kind = kind;
  linear.has_zero_points = kind == PG_KIND_Q4 && first.storage == PG_Q4_1;
  linear.zero_point = kind == PG_KIND_INT8 ? 128 : kind == PG_KIND_Q4 && !linear.has_zero_points ? 8 : 0;
  linear.num_outputs = (int64_t)first.rows * num_tensors;
  linear.num_inputs = first.columns;
  linear.num_groups = divide_up(first.columns, kGroup);
  const int64_t columns_each = kPanel / num_tensors;  // of one tensor in a panel
  // An interleaved weight gives whole groups of its product: an even number of panels.
  linear.num_panels = num_tensors == 1 ? divide_up(first.rows, kPanel) : 2 * divide_up(first.rows, kPanel);
  linear.data = Memory(linear.num_panels * linear.panel_bytes());
  pool.parallel(linear.num_panels, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t p = begin; p < end; p++) pack_panel(linear, tensors, columns_each, p);
  });
  return linear;
}

}  // namespace pageglass
