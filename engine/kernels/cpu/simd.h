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

// GCC 12 takes the undefined registers of its own AVX-512 header for a fault of ours.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <cstdint>
#include <cstring>

namespace pageglass {

constexpr int kLanes = 16;
constexpr int kPairsPerByteVector = 32;
// Adding this rounds a number of magnitude below 2^22 to an integer, ties to even, and puts it into the low bits.
constexpr float kToInteger = 12582912.0f;

#if defined(__AVX512F__)

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
inline Floats round_even(Floats a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// a * 2^n for whole numbers n in [-126, 127]
inline Floats scale_by_power(Floats a, Floats n) {
  const __m512i exponent = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23);
  return {_mm512_mul_ps(a.v, _mm512_castsi512_ps(exponent))};
}
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
inline Ints shift_right_16bit(Ints a, int n) { return {_mm512_srli_epi16(a.v, n)}; }
inline Floats to_floats(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline Ints to_ints(Floats a) { return {_mm512_cvtps_epi32(a.v)}; }  // nearest, ties to even

// acc[i] += sum over k < 4 of u8 a[4 i + k] * s8 b[4 i + k]; no sum of four may leave int32
inline Ints dot_u8_s8(Ints acc, Ints a, Ints b) { return {_mm512_dpbusd_epi32(acc.v, a.v, b.v)}; }

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
inline Ints load_int8(const int8_t* p) { return {_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))}; }

// Lanes as bits: bit i stands for lane i. No comparison holds for a NaN.
inline uint32_t lanes_at_most(Floats a, Floats b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ); }
inline uint32_t lanes_with_nan(Floats a) { return _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q); }
inline Floats keep_lanes(Floats a, uint32_t lanes) { return {_mm512_maskz_mov_ps((__mmask16)lanes, a.v)}; }  // 0 elsewhere
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
inline void store(double* p, Doubles a) {
  _mm512_storeu_pd(p, a.lo);
  _mm512_storeu_pd(p + 8, a.hi);
}

#else  // AVX2: a pair of registers

struct Floats {
  __m256 lo, hi;
};
struct Ints {
  __m256i lo, hi;
};
constexpr bool kIsWide = false;

inline Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Floats a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline Floats broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats add(Floats a, Floats b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline Floats sub(Floats a, Floats b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline Floats mul(Floats a, Floats b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Floats div(Floats a, Floats b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline Floats fma(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline Floats max(Floats a, Floats b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline Floats min(Floats a, Floats b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline Floats abs(Floats a) {
  const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(a.lo, mask), _mm256_and_ps(a.hi, mask)};
}
inline Floats round_even(Floats a) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, mode), _mm256_round_ps(a.hi, mode)};
}
inline __m256 power_of_two(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline Floats scale_by_power(Floats a, Floats n) {
  return {_mm256_mul_ps(a.lo, power_of_two(n.lo)), _mm256_mul_ps(a.hi, power_of_two(n.hi))};
}

inline __m256 add_to_exponent_half(__m256 a, __m256 n_shifted) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(n_shifted), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), exponent));
}
inline Floats add_to_exponent(Floats a, Floats n_shifted) {
  return {add_to_exponent_half(a.lo, n_shifted.lo), add_to_exponent_half(a.hi, n_shifted.hi)};
}

inline Ints load_ints(const void* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
inline void store_ints(void* p, Ints a) {
  _mm256_storeu_si256((__m256i*)p, a.lo);
  _mm256_storeu_si256((__m256i*)p + 1, a.hi);
}
inline Ints broadcast_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Ints and_bits(Ints a, Ints b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
inline Ints add_ints(Ints a, Ints b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline Ints shift_right_16bit(Ints a, int n) { return {_mm256_srli_epi16(a.lo, n), _mm256_srli_epi16(a.hi, n)}; }
inline Floats to_floats(Ints a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline Ints to_ints(Floats a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }

inline __m256i dot_half(__m256i acc, __m256i a, __m256i b) {
#if defined(__AVXVNNI__)
  return _mm256_dpbusd_avx_epi32(acc, a, b);
#else
  // Pairs of products of full bytes overflow 16 bits: even and odd bytes are multiplied apart, as 16-bit numbers.
  const __m256i a_even = _mm256_and_si256(a, _mm256_set1_epi16(0x00ff)), a_odd = _mm256_srli_epi16(a, 8);
  const __m256i b_even = _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8), b_odd = _mm256_srai_epi16(b, 8);
  const __m256i even = _mm256_madd_epi16(a_even, b_even), odd = _mm256_madd_epi16(a_odd, b_odd);
  return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
#endif
}
inline Ints dot_u8_s8(Ints acc, Ints a, Ints b) {
  return {dot_half(acc.lo, a.lo, b.lo), dot_half(acc.hi, a.hi, b.hi)};
}

inline __m256 widen_bf16(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
inline Floats load_bf16(const uint16_t* p) {
  return {widen_bf16(_mm_loadu_si128((const __m128i*)p)), widen_bf16(_mm_loadu_si128((const __m128i*)p + 1))};
}
inline Floats load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p + 1))};
}

inline Floats first_lanes(Floats a, int n, Floats b) {
  const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256 lo = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), index));
  const __m256 hi = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8), index));
  return {_mm256_blendv_ps(b.lo, a.lo, lo), _mm256_blendv_ps(b.hi, a.hi, hi)};
}

inline void keep_greater_half(__m256& best, __m256i& at, __m256 v, __m256i index) {
  const __m256 mask = _mm256_cmp_ps(v, best, _CMP_GT_OQ);
  best = _mm256_blendv_ps(best, v, mask);
  at = _mm256_blendv_epi8(at, index, _mm256_castps_si256(mask));
}
inline void keep_greater(Floats& best, Ints& at, Floats v, Ints index) {
  keep_greater_half(best.lo, at.lo, v.lo, index.lo);
  keep_greater_half(best.hi, at.hi, v.hi, index.hi);
}

inline __m256 low_half(Floats a) { return a.lo; }
inline __m256 high_half(Floats a) { return a.hi; }
inline __m256i low_half(Ints a) { return a.lo; }
inline __m256i high_half(Ints a) { return a.hi; }

inline __m128i narrow_to_int16(__m256i a) {
  return _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
}
inline void store_as_int8(int8_t* p, Ints a) {
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(narrow_to_int16(a.lo), narrow_to_int16(a.hi)));
}
inline Ints load_int8(const int8_t* p) {
  const __m128i bytes = _mm_loadu_si128((const __m128i*)p);
  return {_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))};
}

inline uint32_t lane_bits(__m256 lo, __m256 hi) { return (uint32_t)(_mm256_movemask_ps(lo) | _mm256_movemask_ps(hi) << 8); }
inline uint32_t lanes_at_most(Floats a, Floats b) {
  return lane_bits(_mm256_cmp_ps(a.lo, b.lo, _CMP_LE_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LE_OQ));
}
inline uint32_t lanes_with_nan(Floats a) {
  return lane_bits(_mm256_cmp_ps(a.lo, a.lo, _CMP_UNORD_Q), _mm256_cmp_ps(a.hi, a.hi, _CMP_UNORD_Q));
}
inline __m256 keep_half(__m256 a, uint32_t lanes) {
  const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i kept = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)lanes), bits), bits);
  return _mm256_and_ps(a, _mm256_castsi256_ps(kept));
}
inline Floats keep_lanes(Floats a, uint32_t lanes) { return {keep_half(a.lo, lanes), keep_half(a.hi, lanes >> 8)}; }
template <class Number>
inline void pack_sixteen(Number* p, const Number* numbers, uint32_t lanes) {
  if (lanes == 0xffff) {
    std::memcpy(p, numbers, kLanes * sizeof *p);
    return;
  }
  for (; lanes != 0; lanes &= lanes - 1) *p++ = numbers[__builtin_ctz(lanes)];
}
inline void store_packed(float* p, Floats a, uint32_t lanes) {
  float numbers[kLanes];
  store(numbers, a);
  pack_sixteen(p, numbers, lanes);
}
inline void store_packed(int32_t* p, Ints a, uint32_t lanes) {
  int32_t numbers[kLanes];
  store_ints(numbers, a);
  pack_sixteen(p, numbers, lanes);
}

struct Doubles {
  __m256d quarter[4];
};
inline Doubles add(Doubles a, Floats b) {
  return {{_mm256_add_pd(a.quarter[0], _mm256_cvtps_pd(_mm256_castps256_ps128(b.lo))),
           _mm256_add_pd(a.quarter[1], _mm256_cvtps_pd(_mm256_extractf128_ps(b.lo, 1))),
           _mm256_add_pd(a.quarter[2], _mm256_cvtps_pd(_mm256_castps256_ps128(b.hi))),
           _mm256_add_pd(a.quarter[3], _mm256_cvtps_pd(_mm256_extractf128_ps(b.hi, 1)))}};
}
inline void store(double* p, Doubles a) {
  for (int i = 0; i < 4; i++) _mm256_storeu_pd(p + 4 * i, a.quarter[i]);
}

#endif

// ---- dot products of bfloat16 pairs -----------------------------------------------------------------

#if defined(__AVX512BF16__)
// acc[i] += a[2 i + 1] * b[2 i + 1], then += a[2 i] * b[2 i]: bfloat16 numbers in pairs, low half first in memory
inline Floats dot_bf16(Floats acc, Ints a, Ints b) {
  return {_mm512_dpbf16_ps(acc.v, (__m512bh)a.v, (__m512bh)b.v)};
}
#elif defined(__AVX512F__)
inline Floats dot_bf16(Floats acc, Ints a, Ints b) {
  const __m512i odd = _mm512_set1_epi32((int)0xffff0000u);
  const __m512 a1 = _mm512_castsi512_ps(_mm512_and_si512(a.v, odd)), b1 = _mm512_castsi512_ps(_mm512_and_si512(b.v, odd));
  const __m512 a0 = _mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16)), b0 = _mm512_castsi512_ps(_mm512_slli_epi32(b.v, 16));
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

inline int32_t reduce_add(Ints a) {
  const __m256i eight = _mm256_add_epi32(low_half(a), high_half(a));
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 1)));
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

// e^x within 2 units in the last place on [-87, 88], outside clamped; NaN gives e^-87.
// Cody and Waite's range reduction, a polynomial of degree 6 (Cephes' expf coefficients).
inline Floats exp(Floats x) {
  x = min(max(x, broadcast(-87.0f)), broadcast(88.0f));
  const Floats n = round_even(mul(x, broadcast(1.44269504f)));
  Floats r = fma(n, broadcast(-0.693359375f), x);
  r = fma(n, broadcast(2.12194440e-4f), r);
  Floats p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  p = fma(p, mul(r, r), add(r, broadcast(1.0f)));
  return scale_by_power(p, n);
}

// The same for one number.
inline float exp_of(float x) {
  float lanes[kLanes];
  store(lanes, exp(broadcast(x)));
  return lanes[0];
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
