// What this machine can do at most: multiplications per second of each number type, and bytes per second of memory.
//
// Multiplications are those of the kernels, in tiles as the kernels use them (rows times two vectors of a weight), over
// operands that stay in the first-level cache: what is left of a layer's time is memory, scales and waiting. Bandwidth
// is over buffers far larger than any cache. A ceiling is the median of many short runs.

#pragma once

#include <algorithm>
#include <chrono>

#include "memory.h"
#include "simd.h"
#include "thread_pool.h"

namespace pageglass {

struct Ceilings {
  double int8_gops, bf16_gflops, fp32_gflops;  // a multiplication and an addition are two operations
  double read_gb_s, copy_gb_s;                 // a copy reads and writes: both count
};

class CeilingMeter {
 public:
  explicit CeilingMeter(int num_threads)
      : pool_(num_threads), sinks_((size_t)num_threads), operands_(kSteps * kStepBytes), source_(kBufferBytes) {
    for (int64_t i = 0; i < operands_.num_bytes(); i++) operands_.as<uint8_t>()[i] = (uint8_t)(0x20 + i % 31);
    fill(source_);
  }

  Ceilings measure() {
    const double int8 =
        multiplications<Ints, Ints, 6>([](Ints sum, Ints word, Ints weights) { return dot_u8_s8(sum, word, weights); });
    const double bf16 = multiplications<Floats, Ints, kIsWide ? 6 : 4>(
        [](Floats sum, Ints pair, Ints weights) { return dot_bf16(sum, weights, pair); });
    const double fp32 = multiplications<Floats, Floats, 6>(
        [](Floats sum, Floats number, Floats weights) { return fma(weights, number, sum); });
    const double bytes_read = read_bandwidth();
    return {2 * 4 * kLanes * int8, 2 * 2 * kLanes * bf16, 2 * kLanes * fp32, bytes_read, copy_bandwidth()};
  }

 private:
  static constexpr int kVectors = kIsWide ? 2 : 1;
  static constexpr int64_t kSteps = 64, kVectorBytes = 64, kStepBytes = kVectors * kVectorBytes;
  static constexpr int64_t kRounds = 64, kPiecesPerThread = 64;
  static constexpr int64_t kBufferBytes = 128 << 20, kMemoryPiece = 1 << 20;
  static constexpr double kSecondsPerCeiling = 0.1;
  static constexpr int kMinRuns = 5;

  struct alignas(64) Sink {
    volatile float number;
  };

  // Units of work per nanosecond, of work that has so many.
  template <class Action>
  static double rate(double units, const Action& action) {
    std::vector<double> nanoseconds;
    action();
    const auto started = std::chrono::steady_clock::now();
    auto before = started;
    while (true) {
      action();
      const auto now = std::chrono::steady_clock::now();
      nanoseconds.push_back(std::chrono::duration<double, std::nano>(now - before).count());
      before = now;
      if (now - started > std::chrono::duration<double>(kSecondsPerCeiling) && (int)nanoseconds.size() >= kMinRuns)
        break;
    }
    const auto middle = nanoseconds.begin() + (int64_t)nanoseconds.size() / 2;
    std::nth_element(nanoseconds.begin(), middle, nanoseconds.end());
    return units / *middle;
  }

  static void read(const uint8_t* p, Ints& to) { to = load_ints(p); }
  static void read(const uint8_t* p, Floats& to) { to = load(reinterpret_cast<const float*>(p)); }
  static void spread(const uint8_t* p, Ints& to) { to = broadcast_int(read_as<int32_t>(p)); }
  static void spread(const uint8_t* p, Floats& to) { to = broadcast(read_as<float>(p)); }

  // Whole vectors multiplied and added per nanosecond. multiply(sum, word, weights) adds the products of four bytes
  // that all lanes have with a vector of a weight. A tile's sums must stay in registers, and be more than a multiplier
  // begins before it gives the first result: twelve, or eight where AVX2 needs registers to widen bfloat16.
  template <class Sum, class Operand, int Rows, class Multiply>
  double multiplications(const Multiply& multiply) {
    const int64_t count = kPiecesPerThread * pool_.num_threads();
    const double units = (double)(count * kRounds * kSteps * Rows * kVectors);
    return rate(units, [&] {
      pool_.parallel(count, 1, [&](int64_t first, int64_t last, int thread) {
        for (int64_t i = first; i < last; i++)
          sinks_[(size_t)thread].number = multiply_tiles<Sum, Operand, Rows>(multiply);
      });
    });
  }

  template <class Sum, class Operand, int Rows, class Multiply>
  float multiply_tiles(const Multiply& multiply) const {
    Sum sums[Rows][kVectors] = {};
    for (int64_t round = 0; round < kRounds; round++) {
      const uint8_t* operands = operands_.as<uint8_t>();
      asm volatile("" : "+r"(operands));  // else what the rounds have in common is computed once
      for (int64_t step = 0; step < kSteps; step++, operands += kStepBytes) {
        Operand weights[kVectors], word;
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; v++) read(operands + v * kVectorBytes, weights[v]);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; r++) {
          spread(operands + 4 * r, word);
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; v++) sums[r][v] = multiply(sums[r][v], word, weights[v]);
        }
      }
    }
    float total = 0;
    for (const auto& row : sums) {
      for (const Sum& sum : row) total += (float)reduce_add(sum);
    }
    return total;
  }

  // Bytes per nanosecond.
  double read_bandwidth() {
    return rate((double)kBufferBytes, [&] {
      pool_.parallel(kBufferBytes, kMemoryPiece, [&](int64_t first, int64_t last, int thread) {
        Ints sums[4] = {};
        const uint8_t* from = source_.as<uint8_t>();
        for (int64_t i = first; i < last; i += 4 * kVectorBytes) {
#pragma GCC unroll 4
          for (int v = 0; v < 4; v++) sums[v] = xor_bits(sums[v], load_ints(from + i + v * kVectorBytes));
        }
        const Ints all = xor_bits(xor_bits(sums[0], sums[1]), xor_bits(sums[2], sums[3]));
        sinks_[(size_t)thread].number = (float)reduce_add(all);
      });
    });
  }

  double copy_bandwidth() {
    Memory target(kBufferBytes);
    fill(target);
    return rate(2.0 * kBufferBytes, [&] {
      pool_.parallel(kBufferBytes, kMemoryPiece, [&](int64_t first, int64_t last, int) {
        stream(source_.as<uint8_t>() + first, target.as<uint8_t>() + first, last - first);
      });
    });
  }

  // Past the caches: a line that is written whole need not be read first.
  static void stream(const uint8_t* from, uint8_t* to, int64_t num_bytes) {
    for (int64_t i = 0; i < num_bytes; i += (int64_t)sizeof(__m128i)) {
      _mm_stream_si128((__m128i*)(to + i), _mm_load_si128((const __m128i*)(from + i)));
    }
    _mm_sfence();
  }

  // Takes the pages: those that were never written are all the same one.
  void fill(const Memory& memory) {
    pool_.parallel(kBufferBytes, kMemoryPiece, [&](int64_t first, int64_t last, int) {
      std::memset(memory.as<uint8_t>() + first, 1, (size_t)(last - first));
    });
  }

  ThreadPool pool_;
  std::vector<Sink> sinks_;
  Memory operands_, source_;
};

}  // namespace pageglass
