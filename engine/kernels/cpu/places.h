// Places in the ranking of tokens, found without sorting them all.
//
// The tokens are spread over bins of distance, again within the bin that holds the place, until few are left to sort
// (a radix search). In a long list, that of a nearly flat row, binning every token would take longer than all else.
// There a sample of the tokens says about where the places will be; one pass then adds up what lies before a window
// around each of them and packs what lies in the windows. The sums tell for certain whether a place is in its window;
// only if it is not, by bad luck or because the row is made so, are all tokens spread over bins.

#pragma once

#include "ranking.h"

namespace pageglass {
namespace ranking {

constexpr int kLong = 12288;    // lists up to here are binned as quickly as guessed about
constexpr int kStride = 16;     // vectors of a long list for one in the sample
constexpr int kMaxPlaces = 3;   // the end of top-k, that of top-p, the token drawn
constexpr int kMinMargin = 8;   // sampled tokens on either side of the guess, and
constexpr int kDeviations = 3;  // so many standard deviations of it

// Part of the ranking: the tokens with a distance above `low` and at most `high`.
struct Window {
  float low, high;
  Amount before{};  // the tokens up to `low`; their number is known for the end of top-k only
};

// What places are looked for: the end of top_k (0: none), then that of top_p (1: none), then the token to draw.
struct Search {
  int top_k;
  double top_p, uniform;
  double mass;         // of all tokens or, with top_k, of the list
  bool is_all_listed;  // no token was left out of the list, which may happen without top_k only
};

// All candidates, and room to search them.
struct Ranking {
  explicit Ranking(int vocab_size)
      : all(vocab_size), part(vocab_size), packed(vocab_size), ranks(vocab_size + kLanes) {}
  Candidates all, part;
  Candidates packed;  // the tokens in the windows
  Bins bins, part_bins;
  bool is_spread = false;  // whether `bins` holds `all`
  int num_windows = 0;
  Window windows[kMaxPlaces];
  std::vector<Rank> ranks;
};

inline void spread(Ranking& ranking) {
  ranking.num_windows = 0;
  ranking.is_spread = ranking.all.count > kSortable && fill_bins(ranking.all, ranking.bins);
}

inline double mass_of(const Candidates& list) {
  Doubles sum{};
  for (int i = 0; i < list.count; i += kLanes) sum = add(sum, load(list.masses.data() + i));
  return reduce_add(sum);
}

// ---- guesses ---------------------------------------------------------------------------------------------------

// A sample of a list, which amounts to `total`, in bins. The sample's amounts times `scale` are about the list's.
struct Sample {
  const Bins& bins;
  Amount total;
  double scale;
};

// Every kStride-th vector of a list.
inline void take_sample(const Candidates& list, Candidates& sample) {
  int count = 0;
  for (int i = kStride / 2 * kLanes; i + kLanes <= list.count; i += kStride * kLanes, count += kLanes) {
    store(sample.distances.data() + count, load(list.distances.data() + i));
    store(sample.masses.data() + count, load(list.masses.data() + i));
  }
  finish_list(sample, count);
}

// The bin in which the tokens, counted from the far end, become more than `count`; -1 where there are no more.
inline int bin_from_behind(const Bins& bins, double count) {
  int bin = kNumBins - 1;
  for (; bin >= 0; bin--) {
    count -= bins.amounts[bin].count;
    if (count < 0) break;
  }
  return bin;
}

// How many tokens of the sample lie behind the guessed place of a goal, and how much that number may be wrong.
struct Guess {
  double num_behind, margin;
  double mass_behind;
};

// Count from the far end: what is left to the list's end is known, and the tokens there are many and light, so that
// a sample tells their amount well. Those before the place may be few and heavy: the sample may have missed the best.
inline Guess guess(const Sample& sample, const Goal& goal) {
  const double wanted = std::max(goal.measure(sample.total) - goal.target, 0.0) / sample.scale;
  Amount behind;
  double squares = 0, each = 1;  // of what a token counts for
  for (int bin = kNumBins - 1; bin >= 0; bin--) {
    const Amount& amount = sample.bins.amounts[bin];
    if (amount.count == 0) continue;
    const double measure = goal.measure(amount), share = std::min((wanted - goal.measure(behind)) / measure, 1.0);
    each = measure / amount.count;
    squares += share * measure * each;
    behind = {behind.count + share * amount.count, behind.mass + share * amount.mass};
    if (share < 1) break;
  }
  const double sum = goal.measure(behind);
  const double variance = std::max(squares - sum * sum * sample.scale / sample.total.count, 0.0);
  return {behind.count, kMinMargin + kDeviations * std::sqrt(variance) / each, behind.mass};
}

inline Window window_around(const Guess& guess, const Bins& bins) {
  const auto end_of = [&](int bin) { return bins.first + ((float)bin + 0.5f) / bins.per_distance; };
  const int first = bin_from_behind(bins, guess.num_behind + guess.margin);
  const int last = std::max(bin_from_behind(bins, guess.num_behind - guess.margin), 0);
  return {first <= 0 ? -1.0f : end_of(first - 1), last == kNumBins - 1 ? kLargestDistance : end_of(last)};
}

// Choose windows for the places of a search.
inline void choose_windows(const Sample& sample, const Search& search, Ranking& ranking) {
  ranking.num_windows = 0;
  const auto add_window = [&](const Goal& goal) {
    const Guess found = guess(sample, goal);
    ranking.windows[ranking.num_windows++] = window_around(found, sample.bins);
    return sample.total.mass - sample.scale * found.mass_behind;
  };
  double mass = search.mass;
  if (search.top_k > 0) mass = add_window({true, (double)search.top_k});
  if (search.top_p < 1) add_window({false, mass *= search.top_p});
  add_window({false, mass * search.uniform});
}

// ---- windows ---------------------------------------------------------------------------------------------------

// Pack the tokens of `kNum` windows, in the order of the list, and measure what is before each; `kCounts`: the number
// of tokens before the first, too.
template <int kNum, bool kCounts>
inline void collect(const Candidates& list, Window* windows, Candidates& packed) {
  const float *const all_distances = list.distances.data(), *const all_masses = list.masses.data();
  const int32_t* const all_ids = list.ids.data();
  const int end = list.count;
  float *distances_out = packed.distances.data(), *masses_out = packed.masses.data();
  int32_t* ids_out = packed.ids.data();
  Floats lows[kNum], highs[kNum];
  for (int w = 0; w < kNum; w++) {
    lows[w] = broadcast(windows[w].low);
    highs[w] = broadcast(windows[w].high);
  }
  Doubles sums[kNum] = {};
  int num_before = 0;
  for (int i = 0; i < end; i += kLanes) {
    const Floats distances = load(all_distances + i), masses = load(all_masses + i);
    uint32_t lanes = 0;
    for (int w = 0; w < kNum; w++) {
      sums[w] = add_at_most(sums[w], masses, distances, lows[w]);
      lanes |= lanes_between(lows[w], distances, highs[w]);
    }
    if (kCounts) num_before += __builtin_popcount(lanes_at_most(distances, lows[0]));
    // Most vectors of a flat row have a token in a window and many have not: a branch would be guessed wrong.
    store_packed(distances_out, distances, lanes);
    store_packed(masses_out, masses, lanes);
    store_packed(ids_out, load_ints(all_ids + i), lanes);
    const int num = __builtin_popcount(lanes);
    distances_out += num;
    masses_out += num;
    ids_out += num;
  }
  finish_list(packed, (int)(ids_out - packed.ids.data()));
  for (int w = 0; w < kNum; w++) windows[w].before.mass = reduce_add(sums[w]);
  windows[0].before.count = num_before;
}

// Put the tokens of a window into `part`.
inline void keep_window(const Candidates& list, const Window& window, Candidates& part) {
  const Floats low = broadcast(window.low), high = broadcast(window.high);
  int count = 0;
  for (int i = 0; i < list.count; i += kLanes) {
    const Floats distances = load(list.distances.data() + i);
    const uint32_t lanes = lanes_between(low, distances, high);
    store_packed(part.distances.data() + count, distances, lanes);
    store_packed(part.masses.data() + count, load(list.masses.data() + i), lanes);
    store_packed(part.ids.data() + count, load_ints(list.ids.data() + i), lanes);
    count += __builtin_popcount(lanes);
  }
  finish_list(part, count);
}

// Put the tokens of the window that holds the place of a goal into `ranking.part`; `before`: what precedes them.
// Returns false where no window holds it.
inline bool take_window(Ranking& ranking, const Goal& goal, Amount& before) {
  Candidates& part = ranking.part;
  for (int w = 0; w < ranking.num_windows; w++) {
    before = ranking.windows[w].before;
    if (goal.reached(before) || (goal.by_count && w > 0)) continue;
    keep_window(ranking.packed, ranking.windows[w], part);
    if (goal.reached({before.count + part.count, before.mass + mass_of(part)})) return true;
  }
  return false;
}

// ---- places ----------------------------------------------------------------------------------------------------

// Make ready to find places among `ranking.all`.
inline void prepare(Ranking& ranking, const Search& search) {
  const Candidates& all = ranking.all;
  Candidates& sampled = ranking.part;
  if (all.count > kLong) take_sample(all, sampled);
  if (all.count <= kLong || !fill_bins(sampled, ranking.bins)) return spread(ranking);
  const bool is_known = search.top_k > 0 || search.is_all_listed;
  const Amount total{(double)all.count, is_known ? search.mass : mass_of(all)};
  choose_windows({ranking.bins, total, total.count / sampled.count}, search, ranking);
  if (search.top_k == 0) {
    collect<2, false>(all, ranking.windows, ranking.packed);
  } else if (ranking.num_windows == 2) {
    collect<2, true>(all, ranking.windows, ranking.packed);
  } else {
    collect<3, true>(all, ranking.windows, ranking.packed);
  }
}

inline Place find_place(Ranking& ranking, const Goal& goal) {
  Amount before;
  Candidates& part = ranking.part;
  if (ranking.num_windows == 0 || !take_window(ranking, goal, before)) {
    if (ranking.num_windows > 0) spread(ranking);
    before = {};
    if (!ranking.is_spread) return find_in(ranking.all, goal, before, ranking.ranks);
    keep_bin(ranking.all, ranking.bins, choose_bin(ranking.bins, goal, before), part);
  }
  while (part.count > kSortable && fill_bins(part, ranking.part_bins)) {
    keep_bin(part, ranking.part_bins, choose_bin(ranking.part_bins, goal, before), part);
  }
  return find_in(part, goal, before, ranking.ranks);
}

}  // namespace ranking
}  // namespace pageglass
