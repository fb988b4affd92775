// Attention of one layer over the block pool: the items of a plan, shared among threads, then what is left to combine.
//
// Shapes: queries (rows, heads, head_dim) bfloat16, as RowPreparer makes them; out (rows, heads * head_dim) float32.

#pragma once

#include "attention_kernel.h"
#include "attention_plan.h"
#include "attention_tiles.h"
#include "thread_pool.h"

namespace pageglass {

class Attention {
 public:
  Attention(const KvCache& cache, int num_heads, int num_threads)
      : cache_(cache), num_heads_(num_heads), group_(num_heads / cache.num_kv_heads()), head_dim_(cache.head_dim()) {
    for (int i = 0; i < num_threads; i++) scratch_.emplace_back(cache, AttentionPlan::max_rows_per_item(group_));
  }

  // The keys and values of the plan's rows must have been stored.
  void run(ThreadPool& pool, const AttentionPlan& plan, int layer, const uint16_t* queries, float* out) {
    const Call call{plan, layer, queries, out};
    const int64_t num_heads = cache_.num_kv_heads(), num_units = (int64_t)plan.items().size() * num_heads;
    // Heads of a block lie next to each other: one thread takes them all, unless there is too little to share.
    const int64_t piece = num_units >= 8 * pool.num_threads() * num_heads ? num_heads : 1;
    pool.parallel_in_order(num_units, piece, [&](int64_t first, int64_t last, int thread) {
      for (int64_t unit = first; unit < last; unit++) {
        const int64_t next = unit + 1 < last ? unit + 1 : unit + 1 + (pool.num_threads() - 1) * piece;  // probably
        attend(call, unit, next < num_units ? next : -1, scratch_[(size_t)thread]);
      }
    });
    const auto& combinations = plan.combinations();
    if (combinations.empty()) return;
    pool.parallel((int64_t)combinations.size(), 1, [&](int64_t first, int64_t last, int thread) {
      for (int64_t i = first; i < last; i++) combine(call, combinations[(size_t)i], scratch_[(size_t)thread]);
    });
  }

 private:
  struct Call {
    const AttentionPlan& plan;
    int layer;
    const uint16_t* queries;
    float* out;
  };

  // Rows of a register tile. A row, from here on, is a token (an entry of the item) and a query head.
  struct RowTile {
    int first, num_rows;
    int first_entry, last_entry;  // [first, last]
    int num_visible;              // keys of the partition that at least one of the rows sees
  };

  // One thread's working memory.
  struct Scratch {
    Scratch(const KvCache& cache, int max_rows)
        : reader(cache),
          visible((size_t)max_rows),
          memory(round_up(max_rows, kLanes) * (cache.head_dim() * 8 + kQueryStride * 2 + 16) +
                 kMaxTileRows * kPartition * 6) {
      const int64_t room = round_up(max_rows, kLanes);
      row_tiles.reserve((size_t)max_rows);
      scores = memory.as<float>();
      sums = scores + kMaxTileRows * kPartition;
      totals = sums + room * cache.head_dim();
      float* rest = totals + room * cache.head_dim();
      softmax = {rest, rest + room};
      total_softmax = {rest + 2 * room, rest + 3 * room};
      weights = reinterpret_cast<uint16_t*>(rest + 4 * room);
      queries = weights + kMaxTileRows * kPartition;
    }
    TileReader reader;
    Tiles ahead{};
    std::vector<RowTile> row_tiles;
    std::vector<int> visible;  // keys of the partition that an entry sees
    Memory memory;
    Softmax softmax{}, total_softmax{};  // of the rows in the partition, in all so far
    float *scores, *sums, *totals;       // (kMaxTileRows, kPartition), (rows, head_dim) of the partition, of all so far
    uint16_t *weights, *queries;         // (kMaxTileRows, kPartition), (rows, kQueryStride)
  };

  // What one thread computes at a time: an item and a kv head.
  struct Unit {
    const AttentionItem& item;
    const AttentionEntry* entries;
    CachedHead head;
    int num_rows;
  };

  Unit unit_at(const Call& call, int64_t index) const {
    const AttentionItem& item = call.plan.items()[(size_t)(index / cache_.num_kv_heads())];
    const int kv_head = (int)(index % cache_.num_kv_heads());
    return {item, call.plan.entries(item), {item.table, call.layer, kv_head}, item.num_entries * group_};
  }

  static int tokens_of(const AttentionItem& item, int partition) {
    return std::min(kPartition, item.max_length - partition * kPartition);
  }

  void attend(const Call& call, int64_t index, int64_t next_index, Scratch& scratch) const {
    const Unit unit = unit_at(call, index);
    copy_queries(call, unit, scratch);
    cut_into_tiles(unit, scratch);
    for (int partition = unit.item.first_partition; partition < unit.item.last_partition; partition++) {
      find_visible(unit, partition, scratch);
      const Tiles* ahead = find_ahead(call, unit, partition, next_index, scratch);
      scratch.reader.read(unit.head, partition, tokens_of(unit.item, partition), ahead);
      // The first partition's results are the first totals.
      const bool is_first = unit.item.is_whole && partition == 0;
      const Softmax& softmax = is_first ? scratch.total_softmax : scratch.softmax;
      for (const RowTile& rows : scratch.row_tiles) {
        if (rows.num_visible > 0) {
          compute_rows(rows, ahead, scratch, softmax, is_first ? scratch.totals : scratch.sums);
        } else {  // to fold this in changes nothing
          std::fill_n(softmax.largest + rows.first, rows.num_rows, -std::numeric_limits<float>::infinity());
          std::fill_n(softmax.sums + rows.first, rows.num_rows, 0.0f);
        }
      }
      if (!unit.item.is_whole) {
        leave_partition(call, unit, partition, scratch);
      } else if (!is_first) {
        fold_partition(unit, scratch);
      }
    }
    if (unit.item.is_whole) write_results(call, unit, scratch);
  }

  void copy_queries(const Call& call, const Unit& unit, Scratch& scratch) const {
    uint16_t* to = scratch.queries;
    for (int i = 0; i < unit.item.num_entries; i++) {
      const int64_t head = (int64_t)unit.entries[i].row * num_heads_ + unit.head.kv_head * group_;
      const uint16_t* from = call.queries + head * head_dim_;
      for (int j = 0; j < group_; j++, from += head_dim_, to += kQueryStride) {
        for (int d = 0; d < head_dim_; d += kLanes) std::memcpy(to + d, from + d, kLanes * sizeof(uint16_t));
      }
    }
  }

  // Register tiles of about equal height.
  void cut_into_tiles(const Unit& unit, Scratch& scratch) const {
    scratch.row_tiles.clear();
    const int num_tiles = (unit.num_rows + kMaxTileRows - 1) / kMaxTileRows;
    for (int tile = 0, first = 0; tile < num_tiles; tile++) {
      const int last = unit.num_rows * (tile + 1) / num_tiles;
      scratch.row_tiles.push_back({first, last - first, first / group_, (last - 1) / group_, 0});
      first = last;
    }
  }

  void find_visible(const Unit& unit, int partition, Scratch& scratch) const {
    for (int i = 0; i < unit.item.num_entries; i++) {
      const int seen = unit.entries[i].length - partition * kPartition;
      scratch.visible[(size_t)i] = std::min(kPartition, std::max(0, seen));
    }
    for (RowTile& rows : scratch.row_tiles) {
      const auto first = scratch.visible.begin();
      rows.num_visible = *std::max_element(first + rows.first_entry, first + rows.last_entry + 1);
    }
  }

  // Find what this thread reads after the partition, if that is known and worth fetching early.
  const Tiles* find_ahead(const Call& call, const Unit& unit, int partition, int64_t next_index,
                          Scratch& scratch) const {
    const bool goes_on = partition + 1 < unit.item.last_partition;
    if (!cache_.is_tiled() || (!goes_on && next_index < 0)) return nullptr;
    const Unit next = goes_on ? unit : unit_at(call, next_index);
    const int next_partition = goes_on ? partition + 1 : next.item.first_partition;
    scratch.reader.find_ahead(next.head, next_partition, tokens_of(next.item, next_partition), scratch.ahead);
    return &scratch.ahead;
  }

  // Scores, weights and sums of one register tile. Its scores and weights stay in the first-level cache; keys and
  // values come from the second, where they are after the first tile of rows.
  void compute_rows(const RowTile& rows, const Tiles* ahead, Scratch& scratch, const Softmax& softmax,
                    float* sums) const {
    const bool fetches = rows.first == 0 && scratch.reader.is_direct();
    compute_scores_of(rows, fetches, scratch);
    int num_visible[kMaxTileRows];
    for (int i = 0, entry = rows.first_entry, left = (entry + 1) * group_ - rows.first; i < rows.num_rows; i++) {
      num_visible[i] = scratch.visible[(size_t)entry];
      if (--left > 0) continue;
      entry++;
      left = group_;
    }
    compute_weights({scratch.scores, scratch.weights, num_visible, scratch.reader.scales(), softmax.from(rows.first)},
                    rows.num_rows);
    ValueTask task{scratch.weights,
                   scratch.reader.values().data(),
                   fetches && ahead != nullptr ? ahead->data() : nullptr,
                   head_dim_,
                   0,
                   (rows.num_visible + 1) / 2,
                   sums + (int64_t)rows.first * head_dim_};
    for (; task.first_dim < head_dim_; task.first_dim += kMaxTileVectors * kLanes) {
      add_values(task, rows.num_rows, std::min(kMaxTileVectors, (head_dim_ - task.first_dim) / kLanes));
    }
  }

  void compute_scores_of(const RowTile& rows, bool fetches_values, Scratch& scratch) const {
    const int num_tiles = (rows.num_visible + kTile - 1) / kTile;
    const uint16_t *const *keys = scratch.reader.keys().data(), *const *values = scratch.reader.values().data();
    for (int first = 0; first < num_tiles; first += kMaxTileVectors) {
      compute_scores({scratch.queries + (int64_t)rows.first * kQueryStride, keys + first,
                      fetches_values ? values + first : nullptr, head_dim_, scratch.scores + first * kTile},
                     rows.num_rows, std::min(num_tiles - first, kMaxTileVectors));
    }
  }

  void fold_partition(const Unit& unit, Scratch& scratch) const {
    FoldShares shares;
    for (int i = 0, row = 0; i < unit.item.num_entries; i++) {
      for (int j = 0; j < group_; j++, row++) {
        if (row % kLanes == 0) shares = fold(scratch.total_softmax.from(row), scratch.softmax.from(row));
        if (scratch.visible[(size_t)i] == 0) continue;
        const int64_t at = (int64_t)row * head_dim_;
        fold(scratch.totals + at, scratch.sums + at, shares, row % kLanes, head_dim_);
      }
    }
  }

  void write_results(const Call& call, const Unit& unit, Scratch& scratch) const {
    for (int i = 0, row = 0; i < unit.item.num_entries; i++) {
      const int64_t head = (int64_t)unit.entries[i].row * num_heads_ + unit.head.kv_head * group_;
      for (int j = 0; j < group_; j++, row++) {
        const float* totals = scratch.totals + (int64_t)row * head_dim_;
        finish(totals, scratch.total_softmax.sums[row], head_dim_, call.out + (head + j) * head_dim_);
      }
    }
  }

  // Leave the partition's results for `combine`.
  void leave_partition(const Call& call, const Unit& unit, int partition, Scratch& scratch) const {
    for (int i = 0, row = 0; i < unit.item.num_entries; i++, row += group_) {
      if (scratch.visible[(size_t)i] == 0) continue;
      const PartialResult to = call.plan.partial(unit.entries[i].first_partial + partition);
      const int head = unit.head.kv_head * group_;
      const size_t num_bytes = (size_t)group_ * sizeof(float);
      std::memcpy(to.sums + head * head_dim_, scratch.sums + (int64_t)row * head_dim_, num_bytes * head_dim_);
      std::memcpy(to.largest + head, scratch.softmax.largest + row, num_bytes);
      std::memcpy(to.weights + head, scratch.softmax.sums + row, num_bytes);
    }
  }

  // Fold all partitions of a row, kLanes heads at a time.
  void combine(const Call& call, const AttentionCombination& row, Scratch& scratch) const {
    const Softmax& total = scratch.total_softmax;
    for (int first = 0; first < num_heads_; first += kLanes) {
      const int64_t at = (int64_t)first * head_dim_;
      const int count = std::min(kLanes, num_heads_ - first);
      for (int partition = 0; partition < row.num_partitions; partition++) {
        const PartialResult from = call.plan.partial(row.first_partial + partition);
        const Softmax softmax{from.largest + first, from.weights + first};
        if (partition == 0) {
          store(total.largest, load(softmax.largest));
          store(total.sums, load(softmax.sums));
          std::memcpy(scratch.totals, from.sums + at, (size_t)count * head_dim_ * sizeof(float));
          continue;
        }
        const FoldShares shares = fold(total, softmax);
        for (int j = 0; j < count; j++) {
          const int64_t of_head = (int64_t)j * head_dim_;
          fold(scratch.totals + of_head, from.sums + at + of_head, shares, j, head_dim_);
        }
      }
      float* out = call.out + (int64_t)row.row * num_heads_ * head_dim_ + at;
      for (int j = 0; j < count; j++) {
        finish(scratch.totals + (int64_t)j * head_dim_, total.sums[j], head_dim_, out + (int64_t)j * head_dim_);
      }
    }
  }

  const KvCache& cache_;
  int num_heads_, group_, head_dim_;
  std::vector<Scratch> scratch_;
};

}  // namespace pageglass
