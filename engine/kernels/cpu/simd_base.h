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

}  // namespace pageglass
