// Rows of activations in the form in which they are multiplied, and what makes them: norm, SiLU, rounding.
//
// int8: symmetric per row and group of 32 numbers (a coarser scale costs too much quality: per-row scales give
// a KL of 0.07 to the float32 logits where groups of 32 give 0.005). bfloat16 and float32: as they are.
// Row lengths are padded with zeros to a multiple of 32.

#pragma once

#include <cfloat>
#include <cmath>
#include <limits>

#include "simd.h"
#include "types.h"

namespace pageglass {

enum class Number { kInt8 = 0, kBf16 = 1, kFloat32 = 2 };

inline int64_t bytes_of(Number number) { return number == Number::kInt8 ? 1 : number == Number::kBf16 ? 2 : 4; }

// `num_rows` rows of `width` numbers. For int8 also the integers plus 128, and per row and group: the scale, the sum of
// the integers, and the product of both as bfloat16 (an even number of them, padded with 0).
class Activations {
 public:
  Activations() = default;
  Activations(Number number, int64_t num_rows, int64_t width) : number_(number), width_(width) {
    data_.resize((size_t)(num_rows * width * bytes_of(number) + 64));
    if (number == Number::kInt8) {
      const size_t groups = (size_t)(num_rows * (width / kGroup));
      scales_.resize(groups);
      sums_.resize(groups);
      shifted_.resize(data_.size());
      scaled_sums_.resize((size_t)(num_rows * num_pairs() * 2));
    }
  }

  Number number() const { return number_; }
  int64_t width() const { return width_; }
  template <class T>
  T* row(int64_t r) {
    return reinterpret_cast<T*>(data_.data()) + r * width_;
  }
  template <class T>
  const T* row(int64_t r) const {
    return reinterpret_cast<const T*>(data_.data()) + r * width_;
  }
  const float* scales(int64_t r) const { return scales_.data() + r * (width_ / kGroup); }
  const uint8_t* shifted_row(int64_t r) const { return shifted_.data() + r * width_; }
  int64_t num_pairs() const { return divide_up(width_, 2 * kGroup); }
  const uint16_t* scaled_sums(int64_t r) const { return scaled_sums_.data() + r * num_pairs() * 2; }
  const int32_t* sums(int64_t r) const { return sums_.data() + r * (width_ / kGroup); }

  // Round 32 numbers into group `group` of row `r`.
  void put_group(int64_t r, int64_t group, Floats a, Floats b) {
    const int64_t column = group * kGroup;
    if (number_ == Number::kFloat32) {
      store(row<float>(r) + column, a);
      store(row<float>(r) + column + kLanes, b);
    } else if (number_ == Number::kBf16) {
      store_bf16(row<uint16_t>(r) + column, a);
      store_bf16(row<uint16_t>(r) + column + kLanes, b);
    } else {
      put_int8(r, group, a, b);
    }
  }

  // Round `size` numbers (a multiple of 16) into row `r`; zeros follow them.
  void put_row(int64_t r, const float* values, int64_t size) {
    for (int64_t group = 0; group < width_ / kGroup; group++) {
      const int64_t i = group * kGroup;
      put_group(r, group, load(values + i), i + kLanes < size ? load(values + i + kLanes) : broadcast(0.0f));
    }
  }

 private:
  void put_int8(int64_t r, int64_t group, Floats a, Floats b) {
    float largest = reduce_max(max(abs(a), abs(b)));
    float scale = largest / 127.0f;
    if ((lanes_with_nan(a) | lanes_with_nan(b)) != 0 || !(largest <= FLT_MAX)) {
      // A row with a number that is none shall end in logits that are none, not in plausible ones.
      scale = std::numeric_limits<float>::quiet_NaN();
      a = b = broadcast(0.0f);
    }
    const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
    const Floats factor = broadcast(inverse <= FLT_MAX ? inverse : 0.0f);
    const Ints qa = to_ints(mul(a, factor)), qb = to_ints(mul(b, factor));
    const int32_t sum = reduce_add(add_ints(qa, qb));
    int8_t* out = row<int8_t>(r) + group * kGroup;
    store_as_int8(out, qa);
    store_as_int8(out + kLanes, qb);
    uint8_t* shifted = shifted_.data() + r * width_ + group * kGroup;
    for (int i = 0; i < kGroup; i += 8) {
      const uint64_t flipped = read_as<uint64_t>(reinterpret_cast<const uint8_t*>(out + i)) ^ 0x8080808080808080u;
      std::memcpy(shifted + i, &flipped, 8);
    }
    const int64_t at = r * (width_ / kGroup) + group;
    scales_[(size_t)at] = scale;
    scaled_sums_[(size_t)(r * num_pairs() * 2 + group)] = float_to_bf16(scale * (float)sum);
    sums_[(size_t)at] = sum;
  }

  Number number_ = Number::kInt8;
  int64_t width_ = 0;
  std::vector<uint8_t> data_, shifted_;
  std::vector<float> scales_;
  std::vector<int32_t> sums_;
  std::vector<uint16_t> scaled_sums_;
};

// What a row is divided by to have unit root mean square; `size` numbers, padded with zeros to `width`.
inline float inverse_rms(const float* x, int64_t size, int64_t width, float eps) {
  Floats sum = broadcast(0.0f);
  for (int64_t i = 0; i < width; i += kLanes) {
    const Floats v = load(x + i);
    sum = fma(v, v, sum);
  }
  return 1.0f / std::sqrt(reduce_add(sum) / (float)size + eps);
}

// RMSNorm of a row (Zhang and Sennrich 2019), rounded for multiplication. `weight` is padded like the row.
inline void normalise_row(const float* x, const float* weight, int64_t size, float eps, int64_t r, Activations& out) {
  const Floats factor = broadcast(inverse_rms(x, size, out.width(), eps));
  for (int64_t group = 0; group < out.width() / kGroup; group++) {
    const int64_t i = group * kGroup;
    out.put_group(r, group, mul(mul(load(x + i), factor), load(weight + i)),
                  mul(mul(load(x + i + kLanes), factor), load(weight + i + kLanes)));
  }
}

// x / (1 + e^-x)
inline Floats silu(Floats x) { return div(x, add(broadcast(1.0f), exp(sub(broadcast(0.0f), x)))); }

}  // namespace pageglass
