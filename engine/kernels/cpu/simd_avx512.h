// The operations of `simd.h` with AVX-512: a vector is one register.

#pragma once

#include "simd_base.h"

namespace pageglass {

struct Floats {
  __m512 v;
};
struct Ints {
  __m512i v;
};
constexpr bool kIsWide = true;

inline Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Floats a) { _mm512_storeu_ps(p, a.v); }
inline Floats broadcast(float x) { return {_mm512_set1_ps(x)}; }
inline Floats add(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Floats sub(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Floats mul(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Floats div(Floats a, Floats b) { return {_mm512_div_ps(a.v, b.v)}; }
// a * b + c, rounded once
inline Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// Of a NaN and a number, `b` is returned: give the number second where a NaN must not win.
inline Floats max(Floats a, Floats b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Floats min(Floats a, Floats b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Floats abs(Floats a) { return {_mm512_abs_ps(a.v)}; }
inline Floats round_even(Floats a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// a * 2^n for whole numbers n in [-126, 127]
inline Floats scale_by_power(Floats a, Floats n) { return {_mm512_scalef_ps(a.v, n.v)}; }
// The same for n + kToInteger, where neither `a` nor the result is 0, denormal or infinite.
inline Floats add_to_exponent(Floats a, Floats n_shifted) {
  const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(n_shifted.v), 23);
  return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a.v), exponent))};
}

inline Ints load_ints(const void* p) { return {_mm512_loadu_si512(p)}; }
inline void store_ints(void* p, Ints a) { _mm512_storeu_si512(p, a.v); }
inline Ints broadcast_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline Ints and_bits(Ints a, Ints b) { return {_mm512_and_si512(a.v, b.v)}; }
inline Ints add_ints(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline Ints sub_ints(Ints a, Ints b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline Ints sub_bytes(Ints a, Ints b) { return {_mm512_sub_epi8(a.v, b.v)}; }
inline Ints mul_ints(Ints a, Ints b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
inline Ints xor_bits(Ints a, Ints b) { return {_mm512_xor_si512(a.v, b.v)}; }
template <int N>
inline Ints shift_left(Ints a) {
  return {_mm512_slli_epi32(a.v, N)};
}
template <int N>
inline Ints shift_right(Ints a) {
  return {_mm512_srai_epi32(a.v, N)};
}  // copies of the sign come in
inline Ints shift_right_16bit(Ints a, int n) { return {_mm512_srli_epi16(a.v, n)}; }
inline Floats to_floats(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline Ints to_ints(Floats a) { return {_mm512_cvtps_epi32(a.v)}; }  // nearest, ties to even

// acc[i] += sum over k < 4 of u8 a[4 i + k] * s8 b[4 i + k]; no sum of four may leave int32
inline Ints dot_u8_s8(Ints acc, Ints a, Ints b) { return {_mm512_dpbusd_epi32(acc.v, a.v, b.v)}; }

inline Ints load_uint16(const uint16_t* p) { return {_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p))}; }
inline Floats load_bf16(const uint16_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
inline Floats load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }

// Lanes [0, n) of `a`, the others from `b`.
inline Floats first_lanes(Floats a, int n, Floats b) {
  const __mmask16 mask = n >= kLanes ? 0xffff : (n <= 0 ? 0 : (__mmask16)((1u << n) - 1));
  return {_mm512_mask_blend_ps(mask, b.v, a.v)};
}

// Where v > best: best = v and at = index. A NaN is never greater.
inline void keep_greater(Floats& best, Ints& at, Floats v, Ints index) {
  const __mmask16 mask = _mm512_cmp_ps_mask(v.v, best.v, _CMP_GT_OQ);
  best.v = _mm512_mask_mov_ps(best.v, mask, v.v);
  at.v = _mm512_mask_mov_epi32(at.v, mask, index.v);
}

// Halves of a vector: the tree of a reduction adds lane i and lane i + 8 first, as both sets can.
inline __m256 low_half(Floats a) { return _mm512_castps512_ps256(a.v); }
inline __m256 high_half(Floats a) { return _mm512_extractf32x8_ps(a.v, 1); }
inline __m256i low_half(Ints a) { return _mm512_castsi512_si256(a.v); }
inline __m256i high_half(Ints a) { return _mm512_extracti32x8_epi32(a.v, 1); }

// 16 int32 to 16 int8; every number must lie in [-128, 127].
inline void store_as_int8(int8_t* p, Ints a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a.v)); }
inline Ints magnitude_bits(Floats a) {
  return {_mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(0x7fffffff))};
}
inline Ints max_ints(Ints a, Ints b) { return {_mm512_max_epi32(a.v, b.v)}; }
// 32 int32 in [-127, 127] as int8, their bits flipped where `flip` has ones. Returns their sum.
inline int32_t store_int8_group(uint8_t* p, Ints a, Ints b, int flip) {
  const __m256i bytes =
      _mm256_inserti128_si256(_mm256_castsi128_si256(_mm512_cvtepi32_epi8(a.v)), _mm512_cvtepi32_epi8(b.v), 1);
  _mm256_storeu_si256((__m256i*)p, _mm256_xor_si256(bytes, _mm256_set1_epi8((char)flip)));
  return reduce_add(_mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), bytes));
}
inline Ints load_int8(const int8_t* p) { return {_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
inline Ints load_int16(const int16_t* p) { return {_mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i*)p))}; }

// Lanes as bits: bit i stands for lane i. No comparison holds for a NaN.
inline uint32_t lanes_at_most(Floats a, Floats b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ); }
// The lanes in which low < a <= high.
inline uint32_t lanes_between(Floats low, Floats a, Floats high) {
  return _mm512_mask_cmp_ps_mask(_mm512_cmp_ps_mask(low.v, a.v, _CMP_LT_OQ), a.v, high.v, _CMP_LE_OQ);
}
inline uint32_t lanes_with_nan(Floats a) { return _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q); }
inline Floats keep_lanes(Floats a, uint32_t lanes) {
  return {_mm512_maskz_mov_ps((__mmask16)lanes, a.v)};
}  // 0 elsewhere
// The named lanes side by side. All 16 numbers at `p` are written, those behind the packed ones with anything.
inline void store_packed(float* p, Floats a, uint32_t lanes) {
  _mm512_storeu_ps(p, _mm512_maskz_compress_ps((__mmask16)lanes, a.v));
}
inline void store_packed(int32_t* p, Ints a, uint32_t lanes) {
  _mm512_storeu_si512(p, _mm512_maskz_compress_epi32((__mmask16)lanes, a.v));
}

// Sixteen float64, for sums that must not lose what is small.
struct Doubles {
  __m512d lo, hi;
};
inline Doubles add(Doubles a, Floats b) {
  return {_mm512_add_pd(a.lo, _mm512_cvtps_pd(low_half(b))), _mm512_add_pd(a.hi, _mm512_cvtps_pd(high_half(b)))};
}
// a + b in the lanes in which x <= limit.
inline Doubles add_at_most(Doubles a, Floats b, Floats x, Floats limit) {
  const __mmask16 lanes = _mm512_cmp_ps_mask(x.v, limit.v, _CMP_LE_OQ);
  return {_mm512_mask_add_pd(a.lo, (__mmask8)lanes, a.lo, _mm512_cvtps_pd(low_half(b))),
          _mm512_mask_add_pd(a.hi, (__mmask8)(lanes >> 8), a.hi, _mm512_cvtps_pd(high_half(b)))};
}
inline void store(double* p, Doubles a) {
  _mm512_storeu_pd(p, a.lo);
  _mm512_storeu_pd(p + 8, a.hi);
}

}  // namespace pageglass
