// What both kinds of vectors need to know.

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
constexpr uint32_t kAllLanes = 0xffff;  // lanes as bits: bit i stands for lane i
// Adding this rounds a number of magnitude below 2^22 to an integer, ties to even, and puts it into the low bits.
constexpr float kToInteger = 12582912.0f;

inline int32_t reduce_add(__m256i eight) {
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 1)));
}

constexpr int32_t kInfinityBits = 0x7f800000;
inline float float_of_bits(int32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

}  // namespace pageglass
