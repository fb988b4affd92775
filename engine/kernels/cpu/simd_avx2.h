// The operations of `simd.h` with AVX2: a vector is a pair of registers.

#pragma once

#include "simd_base.h"

namespace pageglass {

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
inline Ints sub_ints(Ints a, Ints b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
inline Ints sub_bytes(Ints a, Ints b) { return {_mm256_sub_epi8(a.lo, b.lo), _mm256_sub_epi8(a.hi, b.hi)}; }
inline Ints mul_ints(Ints a, Ints b) { return {_mm256_mullo_epi32(a.lo, b.lo), _mm256_mullo_epi32(a.hi, b.hi)}; }
inline Ints xor_bits(Ints a, Ints b) { return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)}; }
template <int N>
inline Ints shift_left(Ints a) {
  return {_mm256_slli_epi32(a.lo, N), _mm256_slli_epi32(a.hi, N)};
}
template <int N>
inline Ints shift_right(Ints a) {
  return {_mm256_srai_epi32(a.lo, N), _mm256_srai_epi32(a.hi, N)};
}
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
inline Ints dot_u8_s8(Ints acc, Ints a, Ints b) { return {dot_half(acc.lo, a.lo, b.lo), dot_half(acc.hi, a.hi, b.hi)}; }

inline Ints load_uint16(const uint16_t* p) {
  const __m128i* halves = (const __m128i*)p;
  return {_mm256_cvtepu16_epi32(_mm_loadu_si128(halves)), _mm256_cvtepu16_epi32(_mm_loadu_si128(halves + 1))};
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
inline Ints magnitude_bits(Floats a) {
  const __m256i mask = _mm256_set1_epi32(0x7fffffff);
  return {_mm256_and_si256(_mm256_castps_si256(a.lo), mask), _mm256_and_si256(_mm256_castps_si256(a.hi), mask)};
}
inline Ints max_ints(Ints a, Ints b) { return {_mm256_max_epi32(a.lo, b.lo), _mm256_max_epi32(a.hi, b.hi)}; }
inline int32_t store_int8_group(uint8_t* p, Ints a, Ints b, int flip) {
  const __m128i low = _mm_packs_epi16(narrow_to_int16(a.lo), narrow_to_int16(a.hi));
  const __m128i high = _mm_packs_epi16(narrow_to_int16(b.lo), narrow_to_int16(b.hi));
  const __m256i bytes = _mm256_set_m128i(high, low);
  _mm256_storeu_si256((__m256i*)p, _mm256_xor_si256(bytes, _mm256_set1_epi8((char)flip)));
  return reduce_add(_mm256_add_epi32(_mm256_add_epi32(a.lo, a.hi), _mm256_add_epi32(b.lo, b.hi)));
}
inline Ints load_int8(const int8_t* p) {
  const __m128i bytes = _mm_loadu_si128((const __m128i*)p);
  return {_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))};
}
inline Ints load_int16(const int16_t* p) {
  const __m128i* halves = (const __m128i*)p;
  return {_mm256_cvtepi16_epi32(_mm_loadu_si128(halves)), _mm256_cvtepi16_epi32(_mm_loadu_si128(halves + 1))};
}

inline uint32_t lane_bits(__m256 lo, __m256 hi) {
  return (uint32_t)(_mm256_movemask_ps(lo) | _mm256_movemask_ps(hi) << 8);
}
inline uint32_t lanes_at_most(Floats a, Floats b) {
  return lane_bits(_mm256_cmp_ps(a.lo, b.lo, _CMP_LE_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LE_OQ));
}
inline __m256 between_half(__m256 low, __m256 a, __m256 high) {
  return _mm256_and_ps(_mm256_cmp_ps(low, a, _CMP_LT_OQ), _mm256_cmp_ps(a, high, _CMP_LE_OQ));
}
inline uint32_t lanes_between(Floats low, Floats a, Floats high) {
  return lane_bits(between_half(low.lo, a.lo, high.lo), between_half(low.hi, a.hi, high.hi));
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
// For every set of eight lanes their numbers side by side, a byte each.
struct Packings {
  uint64_t lanes[256];
};
constexpr Packings make_packings() {
  Packings packings{};
  for (int set = 0; set < 256; set++) {
    int num = 0;
    for (int lane = 0; lane < 8; lane++) {
      if (set >> lane & 1) packings.lanes[set] |= (uint64_t)lane << 8 * num++;
    }
  }
  return packings;
}
inline constexpr Packings kPackings = make_packings();

inline __m256i pack_half(__m256i a, uint32_t lanes) {
  const __m128i order = _mm_cvtsi64_si128((long long)kPackings.lanes[lanes & 0xff]);
  return _mm256_permutevar8x32_epi32(a, _mm256_cvtepu8_epi32(order));
}
inline void store_packed(int32_t* p, Ints a, uint32_t lanes) {
  _mm256_storeu_si256((__m256i*)p, pack_half(a.lo, lanes));
  _mm256_storeu_si256((__m256i*)(p + __builtin_popcount(lanes & 0xff)), pack_half(a.hi, lanes >> 8));
}
inline void store_packed(float* p, Floats a, uint32_t lanes) {
  _mm256_storeu_ps(p, _mm256_castsi256_ps(pack_half(_mm256_castps_si256(a.lo), lanes)));
  const __m256i high = pack_half(_mm256_castps_si256(a.hi), lanes >> 8);
  _mm256_storeu_ps(p + __builtin_popcount(lanes & 0xff), _mm256_castsi256_ps(high));
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
inline Doubles add_at_most(Doubles a, Floats b, Floats x, Floats limit) {
  return add(a, {_mm256_and_ps(b.lo, _mm256_cmp_ps(x.lo, limit.lo, _CMP_LE_OQ)),
                 _mm256_and_ps(b.hi, _mm256_cmp_ps(x.hi, limit.hi, _CMP_LE_OQ))});
}
inline void store(double* p, Doubles a) {
  for (int i = 0; i < 4; i++) _mm256_storeu_pd(p + 4 * i, a.quarter[i]);
}

}  // namespace pageglass
