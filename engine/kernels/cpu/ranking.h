// Lists of tokens in the order of their ids, and what finds a place in their ranking: bins, and a walk.
//
// A token has a distance >= 0 from the best one and a mass exp(-distance). Tokens are ranked by distance, then by
// id. The end of a filter and the token to draw are places in that ranking: where the running count, or mass,
// reaches a target. Equal distances need no sorting, because of the order of the lists. Masses are added in
// float64, in an order that the tokens alone decide.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "simd.h"

namespace pageglass {
namespace ranking {

constexpr float kLargestDistance = 87.0f;  // beyond, mass vanishes beside the best token's 1: float64 holds 16 digits
constexpr int kSortable = 64;              // so few tokens are sorted rather than spread over bins
constexpr int kNumBins = 512;              // 8 KiB, so that they stay in the nearest cache
constexpr float kNarrowest = 1e-30f;       // narrower lists are not spread: their bins' width could not be told from 0

inline Floats masses_of(Floats distances) {
  const uint32_t heavy = lanes_at_most(distances, broadcast(kLargestDistance));
  return keep_lanes(exp_of_negative(sub(broadcast(0.0f), distances)), heavy);
}

// Tokens in the order of their ids; the vector that ends the list is filled up with distance inf and mass 0.
struct Candidates {
  explicit Candidates(int vocab_size)
      : distances(vocab_size + 2 * kLanes), masses(vocab_size + 2 * kLanes), ids(vocab_size + 2 * kLanes) {}
  LineVector<float> distances, masses;
  LineVector<int32_t> ids;
  int count = 0;
};

// A token's place in the ranking, as one number: distances are not negative, so their bits ascend with them.
using Rank = uint64_t;

inline Rank rank_of(float distance, int32_t id) {
  uint32_t bits;
  std::memcpy(&bits, &distance, sizeof bits);
  return (Rank)bits << 32 | (uint32_t)id;
}
inline int32_t id_of(Rank rank) { return (int32_t)(uint32_t)rank; }
inline float distance_of(Rank rank) {
  const uint32_t bits = (uint32_t)(rank >> 32);
  float distance;
  std::memcpy(&distance, &bits, sizeof distance);
  return distance;
}

inline void finish_list(Candidates& list, int count) {
  store(list.distances.data() + count, broadcast(INFINITY));
  store(list.masses.data() + count, broadcast(0.0f));
  list.count = count;
}

// What a part of the ranking amounts to.
struct Amount {
  double count = 0, mass = 0;
};

// A place in the ranking: the token at which the running count, or mass, reaches a target.
struct Goal {
  bool by_count;
  double target;
  double measure(Amount a) const { return by_count ? a.count : a.mass; }
  bool reached(Amount a) const { return measure(a) >= target; }
};

struct Place {
  Rank rank;
  double mass;  // of all tokens up to this one
};

// How a list spreads over equal steps of distance.
struct Bins {
  Amount amounts[kNumBins];
  float first = 0, per_distance = 0;
};

inline Floats bins_of(const Bins& bins, Floats distances) {  // whole numbers; from kNumBins on for what fills a list up
  return round_even(mul(sub(distances, broadcast(bins.first)), broadcast(bins.per_distance)));
}

struct Range {
  float nearest, farthest;
};

inline Range range_of(const Candidates& list) {
  Floats nearest = broadcast(INFINITY), farthest = broadcast(0.0f);
  for (int i = 0; i < list.count; i += kLanes) {
    const Floats distances = load(list.distances.data() + i);
    nearest = min(nearest, distances);
    farthest = max(farthest, keep_lanes(distances, lanes_at_most(distances, broadcast(kLargestDistance))));
  }
  return {-reduce_max(sub(broadcast(0.0f), nearest)), reduce_max(farthest)};
}

// Spread a list over bins of its own width: the nearest token falls into the first, the farthest into the last.
// Returns false where there is nothing to tell apart.
inline bool fill_bins(const Candidates& list, Bins& bins) {
  const auto [nearest, farthest] = range_of(list);
  bins.first = nearest;
  const float width = farthest - nearest;
  if (width < kNarrowest) return false;
  bins.per_distance = (kNumBins - 1) / width;
  std::fill(bins.amounts, bins.amounts + kNumBins, Amount{});
  for (int start = 0; start < list.count; start += kLanes) {
    int32_t numbers[kLanes];
    store_ints(numbers, to_ints(bins_of(bins, load(list.distances.data() + start))));
    const int num = std::min(kLanes, list.count - start);
    for (int i = 0; i < num; i++) {
      Amount& amount = bins.amounts[numbers[i]];
      amount.count += 1;
      amount.mass += list.masses[start + i];
    }
  }
  return true;
}

// The bin in which the goal is reached, the last with tokens should rounding have put it behind them all.
// `before`, what precedes the list, becomes what precedes the bin.
inline int choose_bin(const Bins& bins, const Goal& goal, Amount& before) {
  Amount running = before;
  int chosen = 0;
  for (int bin = 0; bin < kNumBins; bin++) {
    if (bins.amounts[bin].count == 0) continue;
    chosen = bin;
    before = running;
    running = {running.count + bins.amounts[bin].count, running.mass + bins.amounts[bin].mass};
    if (goal.reached(running)) break;
  }
  return chosen;
}

// Put the tokens of a bin into `part`, which may be `list` itself.
inline void keep_bin(const Candidates& list, const Bins& bins, int bin, Candidates& part) {
  const Floats wanted = broadcast((float)bin);
  const int end = list.count;
  int count = 0;
  for (int i = 0; i < end; i += kLanes) {
    const Floats distances = load(list.distances.data() + i), found = bins_of(bins, distances);
    const uint32_t lanes = lanes_at_most(wanted, found) & lanes_at_most(found, wanted);
    if (lanes == 0) continue;
    const Floats masses = load(list.masses.data() + i);
    const Ints ids = load_ints(list.ids.data() + i);
    store_packed(part.distances.data() + count, distances, lanes);
    store_packed(part.masses.data() + count, masses, lanes);
    store_packed(part.ids.data() + count, ids, lanes);
    count += __builtin_popcount(lanes);
  }
  finish_list(part, count);
}

// Sort a list and walk to the goal; the last token where rounding has put the goal behind it.
inline Place walk(const Candidates& list, const Goal& goal, Amount running, std::vector<Rank>& ranks) {
  for (int i = 0; i < list.count; i++) ranks[i] = rank_of(list.distances[i], list.ids[i]);
  Rank* const end = ranks.data() + list.count;
  if (!std::is_sorted(ranks.data(), end)) std::sort(ranks.data(), end);
  for (int start = 0; start < list.count; start += kLanes) {
    const int num = std::min(kLanes, list.count - start);
    float numbers[kLanes] = {};
    for (int i = 0; i < num; i++) numbers[i] = distance_of(ranks[start + i]);
    store(numbers, masses_of(load(numbers)));
    for (int i = 0; i < num; i++) {
      running.count += 1;
      running.mass += numbers[i];
      if (goal.reached(running)) return {ranks[start + i], running.mass};
    }
  }
  return {end[-1], running.mass};
}

// The same where all distances are equal: the tokens stand in their order already.
inline Place count_off(const Candidates& list, const Goal& goal, Amount before) {
  const double mass = list.masses[0];
  const auto up_to = [&](int n) { return Amount{before.count + n, before.mass + n * mass}; };
  const double wanted = (goal.target - goal.measure(before)) / (goal.by_count ? 1 : mass);
  int n = (int)std::min(std::max(std::ceil(wanted), 1.0), (double)list.count);
  while (n > 1 && goal.reached(up_to(n - 1))) n--;  // the division was rounded
  while (n < list.count && !goal.reached(up_to(n))) n++;
  return {rank_of(list.distances[0], list.ids[n - 1]), up_to(n).mass};
}

// The place of a goal in a list that is short or cannot be spread.
inline Place find_in(const Candidates& list, const Goal& goal, Amount before, std::vector<Rank>& ranks) {
  if (list.count <= kSortable) return walk(list, goal, before, ranks);
  const auto [nearest, farthest] = range_of(list);
  return nearest == farthest ? count_off(list, goal, before) : walk(list, goal, before, ranks);
}

}  // namespace ranking
}  // namespace pageglass
