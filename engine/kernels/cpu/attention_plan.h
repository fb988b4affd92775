// Who attends to what in one step: rows and keys cut into items that threads take one after another.
//
// An item is a set of rows (query tokens) that read the same blocks over a range of partitions: a few
// adjacent tokens of one sequence, or tokens of several sequences whose tables hold the same blocks there.
// Each item is computed once per kv head, for all query heads of that kv head, so that a key is read once for
// many queries.
//
// What is computed for a row and a partition of kPartition keys depends on the row and those keys only, and
// the partitions of a row are always combined in their order. So nothing that is decided here, from
// batch, number of threads or shared blocks, can change a result by a bit.

#pragma once

#include <algorithm>
#include <cstring>

#include "memory.h"
#include "types.h"

namespace pageglass {

struct AttentionShape {
  int num_heads, num_kv_heads, head_dim, block_size, num_threads;
};

// One row of an item. It sees the first `length` tokens of its sequence.
struct AttentionEntry {
  int32_t row, length;
  int64_t first_partial;  // where the result of the row's partition 0 goes if the item is not whole
};

struct AttentionItem {
  int first_entry, num_entries;
  const int32_t* table;                 // the blocks of a sequence, from its beginning
  int first_partition, last_partition;  // [first, last)
  int max_length;                       // of its rows
  bool is_whole;                        // covers all partitions of its rows: nothing is left to combine
  int64_t cost;                         // of one kv head, in pairs of a query and a key
};

// A row whose partitions were computed by several items.
struct AttentionCombination {
  int32_t row, num_partitions;
  int64_t first_partial;
};

// Where the result of one row in one partition goes: for each head the weighted sum of values (heads, head_dim), the
// largest score and the sum of weights (heads, with room for whole vectors).
struct PartialResult {
  float *sums, *largest, *weights;
};

class AttentionPlan {
 public:
  explicit AttentionPlan(const AttentionShape& shape)
      : shape_(shape),
        group_(shape.num_heads / shape.num_kv_heads),
        entries_per_item_(std::max(1, kRowsPerItem / group_)) {}

  // Queries (tokens times heads of a group) of an item: as many as share a pass over keys, while their scores stay
  // in the second-level cache.
  static constexpr int kRowsPerItem = 48;
  static int max_rows_per_item(int group) { return std::max(kRowsPerItem, group); }

  // Plan a step. Rows of a sequence must be adjacent and in order; the tables must outlive the plan's use and hold
  // a block for every position up to the last row's. `rows` need not be all rows that were stored.
  void build(const Rows& rows, const int32_t* tables, const int32_t* table_starts) {
    items_.clear();
    entries_.clear();
    combinations_.clear();
    num_partials_ = 0;
    find_runs(rows, tables, table_starts);
    share_prefixes();
    for (const Run& run : runs_) add_own_items(run);
    if (shape_.num_threads > 1) split_costly_items();
    place_partials(rows.num_rows);
    std::stable_sort(items_.begin(), items_.end(), [](const auto& a, const auto& b) { return a.cost > b.cost; });
  }

  const std::vector<AttentionItem>& items() const { return items_; }
  const AttentionEntry* entries(const AttentionItem& item) const { return entries_.data() + item.first_entry; }
  const std::vector<AttentionCombination>& combinations() const { return combinations_; }
  const AttentionShape& shape() const { return shape_; }
  int group() const { return group_; }

  PartialResult partial(int64_t index) const {
    float* sums = partials_.as<float>() + index * partial_size();
    float* largest = sums + (int64_t)shape_.num_heads * shape_.head_dim;
    return {sums, largest, largest + round_up(shape_.num_heads, kPadding)};
  }

 private:
  // Adjacent rows of one sequence.
  struct Run {
    int first_row, num_rows, first_length;  // length that the first row sees; each further row sees one more
    const int32_t* table;
    int first_own_partition;  // those before are computed with other sequences
    int last_length() const { return first_length + num_rows - 1; }
    int num_full_partitions() const { return first_length / kPartition; }  // that all its rows see in full
  };

  // What reading a key costs, in pairs of a query and a key (measured: about 16 bytes a nanosecond from memory,
  // against 4 pairs of 64 dimensions).
  static constexpr int kKeyCost = 12;
  // What a second phase with its barrier costs.
  static constexpr int kCombineCost = 3000;
  // Sharing saves the reading of so many partitions or it is not worth that second phase.
  static constexpr int kMinSavedPartitions = 2;

  void find_runs(const Rows& rows, const int32_t* tables, const int32_t* table_starts) {
    runs_.clear();
    for (int row = 0; row < rows.num_rows; row++) {
      if (!runs_.empty() && row > 0 && rows.sequences[row] == rows.sequences[row - 1] &&
          rows.positions[row] == rows.positions[row - 1] + 1) {
        runs_.back().num_rows++;
      } else {
        runs_.push_back({row, 1, rows.positions[row] + 1, tables + table_starts[rows.sequences[row]], 0});
      }
    }
  }

  // ---- sequences with equal beginnings -----------------------------------------------------------------

  void share_prefixes() {
    candidates_.clear();
    for (Run& run : runs_) {
      // Longer runs read their keys once for many queries as it is.
      if (2 * run.num_rows <= entries_per_item_ && run.num_full_partitions() > 0) candidates_.push_back(&run);
    }
    num_saved_ = 0;
    share_among(candidates_.data(), (int)candidates_.size(), 0);
    if (num_saved_ >= kMinSavedPartitions) return;
    items_.clear();
    entries_.clear();
    for (Run& run : runs_) run.first_own_partition = 0;
  }

  // Blocks of one partition in a table.
  const int32_t* first_block(const Run& run, int partition) const {
    return run.table + (int64_t)partition * kPartition / shape_.block_size;
  }
  int compare(const Run& a, const Run& b, int partition) const {
    const int64_t first = (int64_t)partition * kPartition / shape_.block_size;
    const int64_t last = divide_up((int64_t)(partition + 1) * kPartition, shape_.block_size);
    return std::memcmp(first_block(a, partition), first_block(b, partition), (size_t)(last - first) * sizeof(int32_t));
  }

  // `members` have equal tables up to `partition`. Reorders them.
  void share_among(Run** members, int count, int partition) {
    if (count < 2) return;
    int end = partition;
    while (std::all_of(members, members + count, [&](const Run* run) {
      return run->num_full_partitions() > end && compare(*run, *members[0], end) == 0;
    })) {
      end++;
    }
    if (end > partition) add_shared_items(members, count, partition, end);
    for (int i = 0; i < count; i++) members[i]->first_own_partition = end;
    Run** const middle =
        std::partition(members, members + count, [&](const Run* run) { return run->num_full_partitions() > end; });
    std::sort(members, middle, [&](const Run* a, const Run* b) { return compare(*a, *b, end) < 0; });
    for (Run** first = members; first < middle;) {
      Run** last = first + 1;
      while (last < middle && compare(**first, **last, end) == 0) last++;
      share_among(first, (int)(last - first), end);
      first = last;
    }
  }

  void add_shared_items(Run** members, int count, int first_partition, int last_partition) {
    num_saved_ += (int64_t)(count - 1) * (last_partition - first_partition);
    for (int i = 0; i < count;) {
      AttentionItem item = begin_item(*members[i], first_partition, last_partition);
      item.max_length = last_partition * kPartition;
      do {
        add_entries(item, *members[i], 0, members[i]->num_rows);
        i++;
      } while (i < count && item.num_entries + members[i]->num_rows <= entries_per_item_);
      add_item(item);
    }
  }

  // ---- items ---------------------------------------------------------------------------------------------

  AttentionItem begin_item(const Run& run, int first_partition, int last_partition) const {
    return {(int)entries_.size(), 0, run.table, first_partition, last_partition, 0, false, 0};
  }

  void add_entries(AttentionItem& item, const Run& run, int first, int last) {
    for (int i = first; i < last; i++) entries_.push_back({run.first_row + i, run.first_length + i, -1});
    item.num_entries += last - first;
  }

  void add_item(AttentionItem item) {
    item.cost = cost_of(item);
    items_.push_back(item);
  }

  int64_t cost_of(const AttentionItem& item) const {
    const int first = item.first_partition * kPartition, last = item.last_partition * kPartition;
    int64_t seen = (int64_t)(std::min(item.max_length, last) - first) * kKeyCost;
    for (int i = 0; i < item.num_entries; i++) {
      seen += (int64_t)group_ * std::max(0, std::min(entries_[item.first_entry + i].length, last) - first);
    }
    return seen;
  }

  void add_own_items(const Run& run) {
    const int num_tiles = (int)divide_up(run.num_rows, entries_per_item_);
    for (int tile = 0; tile < num_tiles; tile++) {
      const int first = (int)((int64_t)run.num_rows * tile / num_tiles);
      const int last = (int)((int64_t)run.num_rows * (tile + 1) / num_tiles);
      const int length = run.first_length + last - 1;
      const int num_partitions = (int)divide_up(length, kPartition);
      if (run.first_own_partition == num_partitions) continue;
      AttentionItem item = begin_item(run, run.first_own_partition, num_partitions);
      item.max_length = length;
      item.is_whole = run.first_own_partition == 0;
      add_entries(item, run, first, last);
      add_item(item);
    }
  }

  // Few long items keep some threads waiting for the others: cut their ranges.
  void split_costly_items() {
    int64_t total = 0, largest = 0;
    for (const AttentionItem& item : items_) {
      total += item.cost * shape_.num_kv_heads;
      largest = std::max(largest, item.cost);
    }
    const int64_t share = total / shape_.num_threads;
    if (largest / 2 < share / 10 + kCombineCost) return;
    const int64_t target = std::max<int64_t>(share / 8, 1);
    const size_t count = items_.size();
    for (size_t i = 0; i < count; i++) {
      const AttentionItem item = items_[i];
      const int length = item.last_partition - item.first_partition;
      const int parts = (int)std::min<int64_t>(length, divide_up(item.cost, target));
      for (int part = 0; part < parts && parts > 1; part++) {
        AttentionItem piece = item;
        piece.first_partition = item.first_partition + length * part / parts;
        piece.last_partition = item.first_partition + length * (part + 1) / parts;
        piece.is_whole = false;
        piece.cost = cost_of(piece);
        if (part == 0) {
          items_[i] = piece;
        } else {
          items_.push_back(piece);
        }
      }
    }
  }

  static constexpr int kPadding = 16;
  int64_t partial_size() const {
    return (int64_t)shape_.num_heads * shape_.head_dim + 2 * round_up(shape_.num_heads, kPadding);
  }

  // Give rows whose items are not whole a place for the results of their partitions.
  void place_partials(int num_rows) {
    first_partials_.assign((size_t)num_rows, -1);
    for (const AttentionItem& item : items_) {
      for (int i = 0; i < item.num_entries && !item.is_whole; i++) {
        AttentionEntry& entry = entries_[item.first_entry + i];
        int64_t& first = first_partials_[entry.row];
        if (first < 0) {
          const int num_partitions = (int)divide_up(entry.length, kPartition);
          first = num_partials_;
          num_partials_ += num_partitions;
          combinations_.push_back({entry.row, num_partitions, first});
        }
        entry.first_partial = first;
      }
    }
    const int64_t num_bytes = num_partials_ * partial_size() * (int64_t)sizeof(float);
    if (num_bytes > partials_.num_bytes()) partials_ = Memory(num_bytes + num_bytes / 2);
  }

  AttentionShape shape_;
  int group_, entries_per_item_;
  std::vector<Run> runs_;
  std::vector<Run*> candidates_;
  int64_t num_saved_ = 0;
  std::vector<AttentionEntry> entries_;
  std::vector<AttentionItem> items_;
  std::vector<AttentionCombination> combinations_;
  std::vector<int64_t> first_partials_;
  int64_t num_partials_ = 0;
  Memory partials_;
};

}  // namespace pageglass
