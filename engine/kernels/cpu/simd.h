// Sixteen lanes, whatever the processor: vectors of 16 floats, 16 int32 or 64 bytes.
//
// Every kernel is written once over these types. With AVX-512 a vector is one register, with AVX2 a pair.
// Each operation rounds the same way and each reduction adds in the same order in both, so that one
// instruction set gives the same bits as the other: dot products of bfloat16 pairs are two fused
// multiply-adds, odd element first, as the AVX512-BF16 instruction computes them, and everything runs with
// denormals flushed to zero, as that instruction does (`FlushDenormals`).
//
// Instruction sets, chosen by the compiler's flags: AVX-512 (F, BW, DQ, VL, VNNI) with or without
// AVX512-BF16; AVX2 with FMA and F16C, with or without AVX-VNNI.

#pragma once

#if defined(__AVX512F__)
#include "simd_avx512.h"
#else
#include "simd_avx2.h"
#endif

namespace pageglass {

// ---- dot products of bfloat16 pairs -----------------------------------------------------------------

#if defined(__AVX512BF16__)
// acc[i] += a[2 i + 1] * b[2 i + 1], then += a[2 i] * b[2 i]: bfloat16 numbers in pairs, low half first in memory
inline Floats dot_bf16(Floats acc, Ints a, Ints b) { return {_mm512_dpbf16_ps(acc.v, (__m512bh)a.v, (__m512bh)b.v)}; }
#elif defined(__AVX512F__)
inline Floats dot_bf16(Floats acc, Ints a, Ints b) {
  const __m512i odd = _mm512_set1_epi32((int)0xffff0000u);
  const __m512 a1 = _mm512_castsi512_ps(_mm512_and_si512(a.v, odd)),
               b1 = _mm512_castsi512_ps(_mm512_and_si512(b.v, odd));
  const __m512 a0 = _mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16)),
               b0 = _mm512_castsi512_ps(_mm512_slli_epi32(b.v, 16));
  return {_mm512_fmadd_ps(a0, b0, _mm512_fmadd_ps(a1, b1, acc.v))};
}
#else
inline __m256 dot_bf16_half(__m256 acc, __m256i a, __m256i b) {
  const __m256i odd = _mm256_set1_epi32((int)0xffff0000u);
  const __m256 a1 = _mm256_castsi256_ps(_mm256_and_si256(a, odd)), b1 = _mm256_castsi256_ps(_mm256_and_si256(b, odd));
  const __m256 a0 = _mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), b0 = _mm256_castsi256_ps(_mm256_slli_epi32(b, 16));
  return _mm256_fmadd_ps(a0, b0, _mm256_fmadd_ps(a1, b1, acc));
}
inline Floats dot_bf16(Floats acc, Ints a, Ints b) {
  return {dot_bf16_half(acc.lo, a.lo, b.lo), dot_bf16_half(acc.hi, a.hi, b.hi)};
}
#endif

// ---- bfloat16, scalar and vector --------------------------------------------------------------------

inline float bf16_to_float(uint16_t x) {
  const uint32_t bits = (uint32_t)x << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

// Nearest, ties to even; NaN stays NaN; denormals become zero.
inline uint16_t float_to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40u);
  if (magnitude < 0x00800000u) return (uint16_t)((bits >> 16) & 0x8000u);
  return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

#if defined(__AVX512BF16__)
inline void store_bf16(uint16_t* p, Floats a) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(a.v)); }
inline void store_bf16(uint16_t* p, Floats a, Floats b) {
  _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(b.v, a.v));
}
#else
inline __m128i narrow_to_bf16(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
  const __m256i is_nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000));
  const __m256i is_tiny = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x00800000), magnitude);
  const __m256i top = _mm256_srli_epi32(bits, 16);
  const __m256i bias = _mm256_add_epi32(_mm256_set1_epi32(0x7fff), _mm256_and_si256(top, _mm256_set1_epi32(1)));
  __m256i result = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
  result = _mm256_blendv_epi8(result, _mm256_or_si256(top, _mm256_set1_epi32(0x40)), is_nan);
  result = _mm256_blendv_epi8(result, _mm256_and_si256(top, _mm256_set1_epi32(0x8000)), is_tiny);
  return _mm_packus_epi32(_mm256_castsi256_si128(result), _mm256_extracti128_si256(result, 1));
}
inline void store_bf16(uint16_t* p, Floats a) {
  _mm_storeu_si128((__m128i*)p, narrow_to_bf16(low_half(a)));
  _mm_storeu_si128((__m128i*)p + 1, narrow_to_bf16(high_half(a)));
}
inline void store_bf16(uint16_t* p, Floats a, Floats b) {
  store_bf16(p, a);
  store_bf16(p + kLanes, b);
}
#endif

// Pairs of bfloat16, `even` in the low halves.
inline Ints bf16_pairs(Floats even, Floats odd) {
#if defined(__AVX512BF16__)
  const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(even.v));
  const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(odd.v));
  return {_mm512_or_si512(low, _mm512_slli_epi32(high, 16))};
#endif
  uint16_t evens[kLanes], odds[kLanes];
  store_bf16(evens, even);
  store_bf16(odds, odd);
  return xor_bits(load_uint16(evens), shift_left<16>(load_uint16(odds)));
}

// first, first + 1, ... first + 15
inline Ints lane_numbers(int32_t first) {
  alignas(64) static constexpr int32_t kIndex[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return add_ints(load_ints(kIndex), broadcast_int(first));
}

// ---- reductions: one order for all -------------------------------------------------------------------

inline float reduce_add(Floats a) {
  const __m256 eight = _mm256_add_ps(low_half(a), high_half(a));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

inline float reduce_max(Floats a) {
  const __m256 eight = _mm256_max_ps(low_half(a), high_half(a));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

inline int32_t reduce_add(Ints a) { return reduce_add(_mm256_add_epi32(low_half(a), high_half(a))); }

inline int32_t reduce_max(Ints a) {
  const __m256i eight = _mm256_max_epi32(low_half(a), high_half(a));
  const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_max_epi32(four, _mm_unpackhi_epi64(four, four));
  return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 1)));
}

inline double reduce_add(Doubles a) {
  double lanes[kLanes];
  store(lanes, a);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// ---- exp ---------------------------------------------------------------------------------------------

// e^(x - n ln 2) for n the integer nearest to x / ln 2: Cody and Waite's range reduction, a polynomial of degree 6
// (Cephes' expf coefficients).
inline Floats exp_of_rest(Floats x, Floats n) {
  Floats r = fma(n, broadcast(-0.693359375f), x);
  r = fma(n, broadcast(2.12194440e-4f), r);
  Floats p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  return fma(p, mul(r, r), add(r, broadcast(1.0f)));
}

// e^x within 2 units in the last place on [-87, 88], outside clamped; NaN gives e^-87.
inline Floats exp(Floats x) {
  x = min(max(x, broadcast(-87.0f)), broadcast(88.0f));
  const Floats n = round_even(mul(x, broadcast(1.44269504f)));
  return scale_by_power(exp_of_rest(x, n), n);
}

// The same number in fewer instructions for x in [-87, 0]; anything for others.
inline Floats exp_of_negative(Floats x) {
  const Floats n_shifted = add(mul(x, broadcast(1.44269504f)), broadcast(kToInteger));
  return add_to_exponent(exp_of_rest(x, sub(n_shifted, broadcast(kToInteger))), n_shifted);
}

// While one lives, its thread computes with denormals as zero, in and out.
class FlushDenormals {
 public:
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040u); }
  ~FlushDenormals() { _mm_setcsr(before_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  unsigned before_;
};

}  // namespace pageglass
