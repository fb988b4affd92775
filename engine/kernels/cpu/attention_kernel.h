// The arithmetic of attention over one partition: scores, weights, weighted sums of values, and their folding.
//
// Every number is one chain of operations in an order that depends on positions only: a score adds pairs of
// dimensions in order, a weighted sum adds pairs of tokens in order. How many rows and vectors are computed
// together (a register tile) is free. Keys that a row does not see have weight 0, whatever their scores: adding
// 0 times a finite value changes nothing, but for the sign of a zero, which is made positive.
//
// Scores are in powers of two (the queries' scale contains log2(e)).

#pragma once

#include <array>
#include <limits>
#include <utility>

#include "attention_tiles.h"
#include "simd.h"
#include "types.h"

namespace pageglass {

constexpr int kPairsPerTile = kTile / 2;

// Numbers from one query to the next in working memory: fixed, so that addresses are cheap, and no power of two, so
// that the queries of an item do not compete for the same lines of the first-level cache.
constexpr int kQueryStride = 256 + 32;

// A register tile: queries times vectors, as many accumulators as leave room for operands.
#if defined(__AVX512BF16__)
constexpr int kMaxTileRows = 6, kMaxTileVectors = 4;
#elif defined(__AVX512F__)
constexpr int kMaxTileRows = 4, kMaxTileVectors = 4;
#else
constexpr int kMaxTileRows = 4, kMaxTileVectors = 1;
#endif

// Two numbers of a row, for all lanes.
inline Ints broadcast_pair(const uint16_t* pair) {
  int32_t bits;
  std::memcpy(&bits, pair, sizeof bits);
  return broadcast_int(bits);
}

// 2^x for x <= 0, relative error below 1.1e-4 (a weight is then rounded to 8 bits); below -125 as at -125. 2^0 is 1.
inline Floats exp2_of_negative(Floats x) {
  x = max(broadcast(-125.0f), x);  // a NaN stays one
  const Floats n_shifted = add(x, broadcast(kToInteger)), r = sub(x, sub(n_shifted, broadcast(kToInteger)));
  Floats p = broadcast(0.0550089329f);  // least maximum of the relative error on [-0.5, 0.5]
  p = fma(p, r, broadcast(0.2422109693f));
  p = fma(p, r, broadcast(0.6932829022f));
  p = fma(p, r, broadcast(1.0f));
  return add_to_exponent(p, n_shifted);
}

// ---- scores ------------------------------------------------------------------------------------------

// queries (rows of kQueryStride) times tiles of keys give scores (rows, kPartition).
struct ScoreTask {
  const uint16_t* queries;
  const uint16_t* const* tiles;
  const uint16_t* const* ahead;  // tiles of the same size to bring into the cache meanwhile, or null
  int head_dim;
  float* scores;
};

template <int kRows, int kVectors>
void compute_scores(const ScoreTask& task) {
  const uint16_t* queries = task.queries;
  const uint16_t* const* ahead = task.ahead;
  Floats sums[kRows][kVectors];
  const uint16_t* tiles[kVectors];
#pragma GCC unroll 8
  for (int t = 0; t < kVectors; t++) tiles[t] = task.tiles[t];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++) {
#pragma GCC unroll 8
    for (int t = 0; t < kVectors; t++) sums[r][t] = broadcast(0.0f);
  }
  for (int64_t at = 0, end = (int64_t)task.head_dim * kTile; at < end; at += 2 * kTile, queries += 2) {
    Ints keys[kVectors];
#pragma GCC unroll 8
    for (int t = 0; t < kVectors; t++) keys[t] = load_ints(tiles[t] + at);
    if (ahead != nullptr) {
#pragma GCC unroll 8
      for (int t = 0; t < kVectors; t++) prefetch(ahead[t] + at);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) {
      const Ints query = broadcast_pair(queries + r * kQueryStride);
#pragma GCC unroll 8
      for (int t = 0; t < kVectors; t++) sums[r][t] = dot_bf16(sums[r][t], query, keys[t]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++) {
#pragma GCC unroll 8
    for (int t = 0; t < kVectors; t++) store(task.scores + r * kPartition + t * kTile, sums[r][t]);
  }
}

// ---- weighted sums of values ---------------------------------------------------------------------------

// weights (rows, kPartition) times tiles of values, pairs of tokens [0, num_pairs), give vectors of dimensions from
// `first_dim` of sums (rows, head_dim).
struct ValueTask {
  const uint16_t* weights;
  const uint16_t* const* tiles;
  const uint16_t* const* ahead;  // as in ScoreTask
  int head_dim, first_dim, num_pairs;
  float* sums;
};

template <int kRows, int kVectors>
void add_values(const ValueTask& task) {
  const int64_t head_dim = task.head_dim, step = 2 * head_dim;
  float* out = task.sums + task.first_dim;
  Floats sums[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++) {
#pragma GCC unroll 8
    for (int t = 0; t < kVectors; t++) sums[r][t] = broadcast(0.0f);
  }
  const uint16_t* weights = task.weights;
  for (int left = task.num_pairs, tile = 0; left > 0; left -= kPairsPerTile, tile++) {
    const uint16_t* const end = weights + 2 * std::min(kPairsPerTile, left);
    const uint16_t* values = task.tiles[tile] + 2 * task.first_dim;
    const uint16_t* ahead = task.ahead != nullptr ? task.ahead[tile] + 2 * task.first_dim : nullptr;
    for (; weights != end; weights += 2, values += step) {
      Ints vectors[kVectors];
#pragma GCC unroll 8
      for (int t = 0; t < kVectors; t++) vectors[t] = load_ints(values + t * 2 * kLanes);
      if (ahead != nullptr) {
#pragma GCC unroll 8
        for (int t = 0; t < kVectors; t++) prefetch(ahead + t * 2 * kLanes);
        ahead += step;
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; r++) {
        const Ints weight = broadcast_pair(weights + r * kPartition);
#pragma GCC unroll 8
        for (int t = 0; t < kVectors; t++) sums[r][t] = dot_bf16(sums[r][t], weight, vectors[t]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++) {
    // Adding 0 makes -0 to 0: whether a row's last sum was followed by products with 0 must not show.
#pragma GCC unroll 8
    for (int t = 0; t < kVectors; t++) store(out + r * head_dim + t * kLanes, add(sums[r][t], broadcast(0.0f)));
  }
}

// ---- the right function for a register tile ------------------------------------------------------------

using ScoreFunction = void (*)(const ScoreTask&);
using ValueFunction = void (*)(const ValueTask&);

template <size_t... I>
constexpr std::array<ScoreFunction, sizeof...(I)> score_functions(std::index_sequence<I...>) {
  return {compute_scores<I / kMaxTileVectors + 1, I % kMaxTileVectors + 1>...};
}
template <size_t... I>
constexpr std::array<ValueFunction, sizeof...(I)> value_functions(std::index_sequence<I...>) {
  return {add_values<I / kMaxTileVectors + 1, I % kMaxTileVectors + 1>...};
}

// `num_rows` in [1, kMaxTileRows], `num_vectors` in [1, kMaxTileVectors].
inline void compute_scores(const ScoreTask& task, int num_rows, int num_vectors) {
  static constexpr auto functions = score_functions(std::make_index_sequence<kMaxTileRows * kMaxTileVectors>());
  functions[(num_rows - 1) * kMaxTileVectors + num_vectors - 1](task);
}
inline void add_values(const ValueTask& task, int num_rows, int num_vectors) {
  static constexpr auto functions = value_functions(std::make_index_sequence<kMaxTileRows * kMaxTileVectors>());
  functions[(num_rows - 1) * kMaxTileVectors + num_vectors - 1](task);
}

// ---- weights -------------------------------------------------------------------------------------------

// Of each row: the largest score, and the sum of the weights 2^(score - largest).
struct Softmax {
  float *largest, *sums;
  Softmax from(int row) const { return {largest + row, sums + row}; }
};

// The rows of a register tile.
struct WeightTask {
  float* scores;           // (rows, kPartition), scaled in place
  uint16_t* weights;       // (rows, kPartition)
  const int* num_visible;  // (rows) keys from the first on
  TokenScales scales;
  Softmax softmax;
};

// Tiles of a partition, for the rows of a register tile: those that all rows see in full, and those that some row sees
// something of. Both numbers are even, because weights are stored and added up two tiles at a time.
struct TileCounts {
  int num_plain, num_tiles;
};

inline TileCounts count_tiles(const int* num_visible, int num_rows) {
  constexpr int kTwo = 2 * kTile;
  const int least = *std::min_element(num_visible, num_visible + num_rows);
  const int most = *std::max_element(num_visible, num_visible + num_rows);
  return {least / kTwo * 2, (most + kTwo - 1) / kTwo * 2};
}

// Call `body(tile, row, lanes)` for every second tile (`kStep` 2) or each. `lanes(t)` are those of tile t that count.
template <int kRows, int kStep, class Body>
inline __attribute__((always_inline)) void for_tiles(const WeightTask& task, const TileCounts& counts,
                                                     const Body& body) {
  for (int t = 0; t < counts.num_plain; t += kStep) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) body(t, r, [](int) { return kTile; });
  }
  for (int t = counts.num_plain; t < counts.num_tiles; t += kStep) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) body(t, r, [&, r](int tile) { return task.num_visible[r] - tile * kTile; });
  }
}

// Each row's largest score. With scales, scores are multiplied by those of the keys first.
template <int kRows, bool kIsScaled>
inline __attribute__((always_inline)) void find_tops(const WeightTask& task, const TileCounts& counts, Floats* tops) {
  const Floats lowest = broadcast(-std::numeric_limits<float>::infinity());
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++) tops[r] = lowest;
  for_tiles<kRows, 1>(task, counts, [&](int t, int r, const auto& lanes) __attribute__((always_inline)) {
    float* at = task.scores + r * kPartition + t * kTile;
    const Floats score = kIsScaled ? mul(load(at), load(task.scales.keys + t * kTile)) : load(at);
    if (kIsScaled) store(at, score);
    tops[r] = max(tops[r], first_lanes(score, lanes(t), lowest));
  });
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++) {
    task.softmax.largest[r] = reduce_max(tops[r]);
    tops[r] = broadcast(task.softmax.largest[r]);
  }
}

// Turn scores into bfloat16 weights, 0 where a row does not see a key. With scales, weights are multiplied by those of
// the values after they were added up: the sum is then of weights that were not rounded.
template <int kRows, bool kIsScaled>
void compute_weights(const WeightTask task) {
  const TileCounts counts = count_tiles(task.num_visible, kRows);
  const Floats zero = broadcast(0.0f);
  Floats tops[kRows], sums[kRows];
  find_tops<kRows, kIsScaled>(task, counts, tops);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++) sums[r] = zero;
  for_tiles<kRows, 2>(task, counts, [&](int t, int r, const auto& lanes) __attribute__((always_inline)) {
    const auto weigh = [&](int tile) __attribute__((always_inline)) {
      Floats weight = exp2_of_negative(sub(load(task.scores + r * kPartition + tile * kTile), tops[r]));
      if (kIsScaled) {
        sums[r] = add(sums[r], first_lanes(weight, lanes(tile), zero));
        weight = mul(weight, load(task.scales.values + tile * kTile));
      }
      return first_lanes(weight, lanes(tile), zero);
    };
    const Floats first = weigh(t), second = weigh(t + 1);
    store_bf16(task.weights + r * kPartition + t * kTile, first, second);
  });
  const Ints ones = broadcast_int(0x3f803f80);
  for (int t = 0; t < counts.num_tiles && !kIsScaled; t += 2) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) {
      sums[r] = dot_bf16(sums[r], load_ints(task.weights + r * kPartition + t * kTile), ones);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++) task.softmax.sums[r] = reduce_add(sums[r]);
}

template <size_t... I>
constexpr std::array<void (*)(WeightTask), sizeof...(I)> weight_functions(std::index_sequence<I...>) {
  return {compute_weights<I / 2 + 1, I % 2 == 1>...};
}
inline void compute_weights(const WeightTask& task, int num_rows) {
  static constexpr auto functions = weight_functions(std::make_index_sequence<kMaxTileRows * 2>());
  functions[(num_rows - 1) * 2 + (task.scales.keys != nullptr)](task);
}

// ---- partitions ----------------------------------------------------------------------------------------

// How totals and the next partition's sums are added, for kLanes rows.
struct FoldShares {
  alignas(64) float of_totals[kLanes], of_sums[kLanes];
};

// Take kLanes rows' softmax over the next partition into that over the partitions so far.
inline FoldShares fold(const Softmax& total, const Softmax& next) {
  constexpr float kLn2 = 0.69314718f;
  const Floats largest = max(load(total.largest), load(next.largest));
  const Floats of_total = exp(mul(sub(load(total.largest), largest), broadcast(kLn2)));
  const Floats of_next = exp(mul(sub(load(next.largest), largest), broadcast(kLn2)));
  FoldShares shares;
  store(shares.of_totals, of_total);
  store(shares.of_sums, of_next);
  store(total.sums, fma(load(next.sums), of_next, mul(load(total.sums), of_total)));
  store(total.largest, largest);
  return shares;
}

// The same for a row's weighted sums of values (head_dim). The totals after the first partition are its sums.
inline void fold(float* totals, const float* sums, const FoldShares& shares, int lane, int head_dim) {
  const Floats of_totals = broadcast(shares.of_totals[lane]), of_sums = broadcast(shares.of_sums[lane]);
  for (int d = 0; d < head_dim; d += kLanes) {
    store(totals + d, fma(load(sums + d), of_sums, mul(load(totals + d), of_totals)));
  }
}

// Write a row's result (head_dim) once all its partitions are in.
inline void finish(const float* totals, float sum_of_weights, int head_dim, float* out) {
  const Floats inverse = broadcast(1.0f / sum_of_weights);
  for (int d = 0; d < head_dim; d += kLanes) store(out + d, mul(load(totals + d), inverse));
}

}  // namespace pageglass
