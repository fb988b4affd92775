// The next token of a row of logits (vocab_size): the most likely one, or one drawn with temperature, top-k and
// top-p. The meaning is that of `engine/model/sampler.py`.
//
// Beside its logit a token has a distance (largest logit - logit) / temperature >= 0, rounded like any float32,
// and a mass exp(-distance). Tokens are ranked by distance, then by id. A draw depends on nothing but the row,
// the parameters and the uniform number: masses are added in float64 in an order fixed by the row alone.
//
// Filters do not sort the vocabulary: tokens that can survive are gathered by a bound that costs one pass, and
// where the filters end, and which token is drawn, are places in their ranking (`places.h`).

#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "places.h"
#include "simd.h"
#include "thread_pool.h"
#include "types.h"

namespace pageglass {

constexpr int32_t kNoToken = -1;      // none was wanted
constexpr int32_t kFailedToken = -2;  // the largest logit is no finite number

// How one token is drawn. temperature > 0; top_k 0 and top_p 1 are off; uniform in [0, 1).
struct DrawParams {
  float temperature;
  int32_t top_k;
  double top_p;
  double uniform;
};

namespace sampling {

constexpr int kBlock = 128;  // tokens whose largest logit, or mass, is known together

struct Row {
  const float* logits;
  int vocab_size;
  float largest, temperature;
};

}  // namespace sampling

// What one thread needs to draw from rows of up to `vocab_size` logits.
class DrawScratch {
 public:
  explicit DrawScratch(int vocab_size)
      : blocks(divide_up(vocab_size, sampling::kBlock)), sorted_blocks(blocks.size()), ranking(vocab_size) {}
  std::vector<double> blocks;  // mass or largest logit of each block
  std::vector<float> sorted_blocks;
  ranking::Ranking ranking;  // of the tokens that can survive the filters
};

namespace sampling {

// Sixteen logits from `start` on; -inf behind the end.
inline Floats load_logits(const float* logits, int start, int vocab_size) {
  if (start + kLanes <= vocab_size) return load(logits + start);
  float numbers[kLanes];
  for (int i = 0; i < kLanes; i++) numbers[i] = start + i < vocab_size ? logits[start + i] : -INFINITY;
  return load(numbers);
}

inline Floats distances_at(const Row& row, int start) {
  const Floats below = sub(broadcast(row.largest), load_logits(row.logits, start, row.vocab_size));
  return abs(div(below, broadcast(row.temperature)));  // zeros without a sign: ranks are made of their bits
}

// Call on_block(index, largest logit) for every block. Returns false where a logit is NaN.
template <class OnBlock>
inline bool scan_blocks(const float* logits, int vocab_size, const OnBlock& on_block) {
  uint32_t broken = 0;
  for (int start = 0, block = 0; start < vocab_size; start += kBlock, block++) {
    Floats largest = broadcast(-INFINITY);
    for (int i = start; i < std::min(start + kBlock, vocab_size); i += kLanes) {
      const Floats x = load_logits(logits, i, vocab_size);
      broken |= lanes_with_nan(x);
      largest = max(largest, x);
    }
    on_block(block, reduce_max(largest));
  }
  return broken == 0;
}

// ---- without filters: the cumulative distribution in the order of ids ---------------------------------

// The first token at which the running mass passes the share `uniform` of the whole.
inline int32_t draw_from_all(const Row& row, double uniform, DrawScratch& scratch) {
  double total = 0;
  int last = 0;
  std::vector<double>& blocks = scratch.blocks;
  const int num_blocks = (int)divide_up(row.vocab_size, kBlock);
  for (int block = 0; block < num_blocks; block++) {
    Doubles sum{};
    const int end = std::min((block + 1) * kBlock, row.vocab_size);
    for (int i = block * kBlock; i < end; i += kLanes) sum = add(sum, ranking::masses_of(distances_at(row, i)));
    blocks[block] = reduce_add(sum);
    total += blocks[block];
    if (blocks[block] > 0) last = block;
  }
  const double target = uniform * total;
  double before = 0;
  int block = 0;
  while (block < last && before + blocks[block] <= target) before += blocks[block++];

  int32_t token = block * kBlock;  // the last one with mass, should rounding have put the target behind it
  const int end = std::min((block + 1) * kBlock, row.vocab_size);
  for (int start = block * kBlock; start < end; start += kLanes) {
    float masses[kLanes];
    store(masses, ranking::masses_of(distances_at(row, start)));
    for (int i = 0; i < kLanes; i++) {
      if (masses[i] > 0) token = start + i;
      before += masses[i];
      if (before > target) return token;
    }
  }
  return token;
}

// ---- with filters: places in the ranking ---------------------------------------------------------------

// Gather the tokens whose distance is at most `limit` (at most ranking::kLargestDistance, so that all have mass).
// Returns the mass of the row; without `whole_row` only that of what was gathered.
inline double gather(const Row& row, float limit, bool whole_row, ranking::Candidates& list) {
  Doubles sum{};
  int count = 0;
  const Ints lane_ids = lane_numbers(0);
  for (int i = 0; i < row.vocab_size; i += kLanes) {
    const Floats distances = distances_at(row, i);
    const uint32_t lanes = lanes_at_most(distances, broadcast(limit));
    if (lanes == 0 && !whole_row) continue;
    const Floats masses = ranking::masses_of(distances);
    sum = add(sum, whole_row ? masses : keep_lanes(masses, lanes));
    if (lanes == 0) continue;
    if (lanes == kAllLanes) {  // the rule in flat rows, and quicker
      store(list.distances.data() + count, distances);
      store(list.masses.data() + count, masses);
      store_ints(list.ids.data() + count, add_ints(lane_ids, broadcast_int(i)));
      count += kLanes;
      continue;
    }
    store_packed(list.distances.data() + count, distances, lanes);
    store_packed(list.masses.data() + count, masses, lanes);
    store_packed(list.ids.data() + count, add_ints(lane_ids, broadcast_int(i)), lanes);
    count += __builtin_popcount(lanes);
  }
  ranking::finish_list(list, count);
  return reduce_add(sum);
}

// The distance that no survivor of the filters exceeds.
inline float largest_distance(const Row& row, int top_k, double top_p, DrawScratch& scratch) {
  const int num_blocks = (int)divide_up(row.vocab_size, kBlock);
  if (top_k == 0) {
    // Tokens lighter than (1 - top_p) / vocab_size come, even together, to less than 1 - top_p of the row,
    // whose mass is at least 1. A thousandth on top covers rounding.
    const double distance = std::log(row.vocab_size / (1.0 - top_p)) + 1e-3;
    return (float)std::min(distance, (double)ranking::kLargestDistance);
  }
  if (top_k > num_blocks) return ranking::kLargestDistance;
  // As many blocks hold a token at least as near as the top_k-th nearest of the blocks' best.
  float* first = scratch.sorted_blocks.data();
  std::copy(scratch.blocks.begin(), scratch.blocks.begin() + num_blocks, first);
  std::nth_element(first, first + top_k - 1, first + num_blocks, std::greater<float>());
  return std::min((row.largest - first[top_k - 1]) / row.temperature, ranking::kLargestDistance);
}

// top_k 0 or less than the vocabulary, top_p at most 1; `scratch.blocks` holds the blocks' largest logits.
inline int32_t draw_filtered(const Row& row, int top_k, const DrawParams& params, DrawScratch& scratch) {
  const float limit = largest_distance(row, top_k, params.top_p, scratch);
  ranking::Ranking& candidates = scratch.ranking;
  ranking::Place end{~(ranking::Rank)0, gather(row, limit, top_k == 0, candidates.all)};
  const bool is_all_listed = candidates.all.count == row.vocab_size;
  prepare(candidates, {top_k, params.top_p, params.uniform, end.mass, is_all_listed});
  if (top_k > 0) end = find_place(candidates, {true, (double)top_k});
  if (params.top_p < 1.0) {  // counted from what top_k has left
    const ranking::Place place = find_place(candidates, {false, params.top_p * end.mass});
    if (place.rank < end.rank) end = place;
  }
  // The running mass must pass the target, not only reach it.
  const double target = std::nextafter(params.uniform * end.mass, (double)INFINITY);
  return ranking::id_of(std::min(find_place(candidates, {false, target}).rank, end.rank));
}

}  // namespace sampling

// The id of the largest of `logits` (vocab_size), the first of equals; kFailedToken unless that is a finite number.
inline int32_t argmax_row(const float* logits, int vocab_size) {
  FlushDenormals flush;  // what counts as equal must not depend on the caller's mode
  float largest = -INFINITY;
  int best_block = 0;
  const bool numbers = sampling::scan_blocks(logits, vocab_size, [&](int block, float x) {
    if (x > largest) {
      largest = x;
      best_block = block;
    }
  });
  if (!numbers || !std::isfinite(largest)) return kFailedToken;
  const float* first = logits + (int64_t)best_block * sampling::kBlock;
  return (int32_t)(std::find(first, logits + vocab_size - 1, largest) - logits);
}

// A token drawn from `logits` (vocab_size); kFailedToken where the largest is no finite number or one is NaN.
inline int32_t draw_row(const float* logits, int vocab_size, const DrawParams& params, DrawScratch& scratch) {
  FlushDenormals flush;
  float largest = -INFINITY;
  const bool numbers = sampling::scan_blocks(logits, vocab_size, [&](int block, float x) {
    scratch.blocks[block] = x;
    largest = std::max(largest, x);
  });
  if (!numbers || !std::isfinite(largest)) return kFailedToken;
  const sampling::Row row{logits, vocab_size, largest, std::max(params.temperature, FLT_MIN)};
  const int top_k = params.top_k < vocab_size ? params.top_k : 0;
  if (top_k == 0 && params.top_p >= 1.0) return sampling::draw_from_all(row, params.uniform, scratch);
  return sampling::draw_filtered(row, top_k, params, scratch);
}

// ---- batches ---------------------------------------------------------------------------------------------

// How the next tokens of a batch are chosen: arrays of an entry per row. The last four count for PG_DRAW only.
struct SamplingBatch {
  int num_rows, vocab_size;
  const uint8_t* wants;  // PgWant
  const float* temperatures;
  const int32_t* top_ks;
  const double* top_ps;
  const double* uniforms;
};

// Throw BadArgument, naming field and row, where a batch cannot be sampled.
inline void check_sampling(const SamplingBatch& batch) {
  const auto refuse = [](const char* field, int row, const char* allowed) {
    throw BadArgument(std::string(field) + " of row " + std::to_string(row) + " is out of range; allowed: " + allowed +
                      ".");
  };
  if (batch.vocab_size < 1)
    throw BadArgument("vocab_size is " + std::to_string(batch.vocab_size) + "; allowed: 1 or more.");
  for (int row = 0; row < batch.num_rows; row++) {
    if (batch.wants[row] > PG_DRAW) refuse("wants", row, "0 (nothing), 1 (greedy), 2 (draw)");
    if (batch.wants[row] != PG_DRAW) continue;
    const float temperature = batch.temperatures[row];
    const double top_p = batch.top_ps[row];
    const double uniform = batch.uniforms[row];
    if (!(temperature > 0 && std::isfinite(temperature))) refuse("temperature", row, "above 0 and finite");
    if (batch.top_ks[row] < 0) refuse("top_k", row, "0 (off) or more");
    if (!(top_p > 0 && top_p <= 1)) refuse("top_p", row, "above 0 and at most 1");
    if (!(uniform >= 0 && uniform < 1)) refuse("uniform", row, "0 to below 1");
  }
}

// Choose the next token of every row of a checked batch: kNoToken where none is wanted. All threads call it;
// `row_of(i)` is where row i's logits (vocab_size) are and `scratches` has an entry for each thread.
template <class RowOf>
inline void draw_rows(ThreadPool& pool, const SamplingBatch& batch, const RowOf& row_of,
                      std::vector<DrawScratch>& scratches, int32_t* next_token_ids) {
  pool.parallel_in_order(batch.num_rows, 1, [&](int64_t first, int64_t last, int thread) {
    for (int64_t i = first; i < last; i++) {
      if (batch.wants[i] == PG_NOTHING) {
        next_token_ids[i] = kNoToken;
      } else if (batch.wants[i] == PG_GREEDY) {
        next_token_ids[i] = argmax_row(row_of(i), batch.vocab_size);
      } else {
        const DrawParams params{batch.temperatures[i], batch.top_ks[i], batch.top_ps[i], batch.uniforms[i]};
        next_token_ids[i] = draw_row(row_of(i), batch.vocab_size, params, scratches[(size_t)thread]);
      }
    }
  });
}

// The same outside a step, with threads of its own: logits (num_rows, vocab_size), a row for every entry.
inline void sample_rows(const float* logits, const SamplingBatch& batch, int32_t* next_token_ids, int num_threads) {
  if (batch.num_rows < 0) throw BadArgument("rows is " + std::to_string(batch.num_rows) + "; allowed: 0 or more.");
  if (num_threads < 1) throw BadArgument("num_threads is " + std::to_string(num_threads) + "; allowed: 1 or more.");
  check_sampling(batch);
  ThreadPool pool(num_threads);
  std::vector<DrawScratch> scratches(num_threads, DrawScratch(batch.vocab_size));
  const auto row_of = [&](int64_t i) { return logits + i * batch.vocab_size; };
  draw_rows(pool, batch, row_of, scratches, next_token_ids);
}

}  // namespace pageglass
