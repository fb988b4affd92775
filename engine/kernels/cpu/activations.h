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

// `num_rows` rows of `width` numbers. For int8 also, per row and group: the scale, the sum of the integers, and the
// product of both as bfloat16 (an even number of them, padded with 0).
class Activations {
 public:
  Activations() = default;
  Activations(Number number, int64_t num_rows, int64_t width) : number_(number), width_(width) {
    data_.resize((size_t)(num_rows * width * bytes_of(number) + 64));
    if (number == Number::kInt8) {
      const size_t groups = (size_t)(num_rows * (width / kGroup));
      scales_.resize(groups);
      sums_.resize(groups);
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
  // Whether integers are stored plus 128, as uint8: what a spread panel is multiplied with.
  bool is_shifted() const { return is_shifted_; }
  void set_shifted(bool is_shifted) { is_shifted_ = is_shifted; }
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
    const int32_t bits = reduce_max(max_ints(magnitude_bits(a), magnitude_bits(b)));
    const float largest = float_of_bits(bits);
    float scale = largest / 127.0f;
    if (bits >= kInfinityBits) {
      // A row with a number that is none shall end in logits that are none, not in plausible ones.
      scale = std::numeric_limits<float>::quiet_NaN();
      a = b = broadcast(0.0f);
    }
    const float inverse = 127.0f / largest;
    const Floats factor = broadcast(inverse <= FLT_MAX ? inverse : 0.0f);
    const int32_t sum = store_int8_group(row<uint8_t>(r) + group * kGroup, to_ints(mul(a, factor)),
                                         to_ints(mul(b, factor)), is_shifted_ ? 0x80 : 0);
    const int64_t at = r * (width_ / kGroup) + group;
    scales_[(size_t)at] = scale;
    scaled_sums_[(size_t)(r * num_pairs() * 2 + group)] = float_to_bf16(scale * (float)sum);
    sums_[(size_t)at] = sum;
  }

  Number number_ = Number::kInt8;
  int64_t width_ = 0;
  bool is_shifted_ = false;
  LineVector<uint8_t> data_;
  LineVector<float> scales_;
  LineVector<int32_t> sums_;
  LineVector<uint16_t> scaled_sums_;
};

// What a row is divided by to have unit root mean square; `size` numbers, padded with zeros to `width`.
inline float inverse_rms(const float* x, int64_t size, int64_t width, float eps) {
  Floats sums[4] = {broadcast(0.0f), broadcast(0.0f), broadcast(0.0f), broadcast(0.0f)};  // not one long chain
  int64_t i = 0;
  const auto add_vector = [&](Floats& sum) {
    sum = fma(load(x + i), load(x + i), sum);
    i += kLanes;
  };
  while (i + 4 * kLanes <= width) {
    for (Floats& sum : sums) add_vector(sum);
  }
  while (i < width) add_vector(sums[0]);
  const Floats sum = add(add(sums[0], sums[1]), add(sums[2], sums[3]));
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

// x / (1 + e^-x); e^-x, as 2^(n + r), has a relative error below 2e-6 for |x| < 20 and is clamped far from there.
inline Floats silu(Floats x) {
  const Floats exponent = min(max(mul(x, broadcast(-1.44269504f)), broadcast(-126.0f)), broadcast(126.0f));
  const Floats n = round_even(exponent), r = sub(exponent, n);
  Floats p = broadcast(1.3264718e-3f);  // least maximum of the relative error on [-0.5, 0.5]
  p = fma(p, r, broadcast(9.6715130e-3f));
  p = fma(p, r, broadcast(5.5507340e-2f));
  p = fma(p, r, broadcast(2.4022242e-1f));
  p = fma(p, r, broadcast(6.9314700e-1f));
  p = fma(p, r, broadcast(1.0f));
  // Far below 0 the result is none that matters, whatever the clamped power; of -inf it is a NaN.
  const Floats dividend = add(max(broadcast(-1000.0f), x), sub(x, x));
  return div(dividend, add(broadcast(1.0f), scale_by_power(p, n)));
}

}  // namespace pageglass
