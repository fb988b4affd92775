// Finds the tiles of keys and values of a partition: in place where the pool holds bfloat16 tiles, else as copies.

#pragma once

#include <algorithm>
#include <array>

#include "kv_cache.h"
#include "simd.h"
#include "types.h"

namespace pageglass {

constexpr int kTilesPerPartition = kPartition / kTile;

using Tiles = std::array<const uint16_t*, kTilesPerPartition>;

// Scales of a partition's tokens (kPartition), or null where numbers are bfloat16.
struct TokenScales {
  const float* keys = nullptr;
  const float* values = nullptr;
};

// The cached tokens of one sequence in one layer and kv head.
struct CachedHead {
  const int32_t* table;
  int layer, kv_head;
};

// One thread's view of a partition at a time.
class TileReader {
 public:
  explicit TileReader(const KvCache& cache)
      : cache_(cache),
        head_dim_(cache.head_dim()),
        memory_((int64_t)(2 * kPartition + 2) * head_dim_ * 2 + (cache.is_int8() ? 2 * kPartition * 4 : 0)) {
    keys_ = memory_.as<uint16_t>();
    values_ = keys_ + kPartition * head_dim_;
    row_ = values_ + kPartition * head_dim_;
    key_scales_ = reinterpret_cast<float*>(row_ + 2 * head_dim_);
    value_scales_ = key_scales_ + kPartition;
  }

  const Tiles& keys() const { return key_tiles_; }
  const Tiles& values() const { return value_tiles_; }
  TokenScales scales() const { return cache_.is_int8() ? TokenScales{key_scales_, value_scales_} : TokenScales{}; }
  // Whether tiles are used where they lie.
  bool is_direct() const { return cache_.is_tiled() && !cache_.is_int8(); }

  // Find the tiles of the first `num_tokens` tokens of a partition. Values after the last token count as 0 in its pair.
  // While it copies int8, it fetches what `ahead` points at (see `find_ahead`), unless that is null.
  void read(const CachedHead& head, int partition, int num_tokens, const Tiles* ahead) {
    if (is_direct()) {
      point_at_tiles(head, partition, num_tokens);
      return;
    }
    for (int tile = 0; tile * kTile < num_tokens; tile++) {
      const int position = partition * kPartition + tile * kTile, count = std::min(kTile, num_tokens - tile * kTile);
      uint16_t* keys = keys_ + tile * kTile * head_dim_;
      uint16_t* values = values_ + tile * kTile * head_dim_;
      key_tiles_[(size_t)tile] = keys;
      value_tiles_[(size_t)tile] = values;
      if (cache_.is_tiled()) {
        expand(head, position, ahead != nullptr ? (*ahead)[(size_t)tile] : nullptr, keys, values);
      } else {
        gather(head, position, count, keys, values);
      }
    }
  }

  // Find what to fetch before a partition is read: its chunks. Those after the last repeat it. Not for blocks of rows.
  void find_ahead(const CachedHead& head, int partition, int num_tokens, Tiles& tiles) const {
    int block = partition * kPartition / cache_.block_size(), offset = partition * kPartition % cache_.block_size();
    for (int tile = 0; tile < kTilesPerPartition; tile++) {
      const bool exists = tile * kTile < num_tokens;
      tiles[(size_t)tile] = exists ? chunk_at(head, block, offset) : tiles[(size_t)tile - 1];
      offset += kTile;
      if (offset < cache_.block_size()) continue;
      offset = 0;
      block++;
    }
  }

 private:
  const uint8_t* bytes_at(const CachedHead& head, int position) const {
    return cache_.head(head.layer, head.table[position / cache_.block_size()], head.kv_head);
  }

  const uint16_t* chunk_at(const CachedHead& head, int block, int offset) const {
    const uint8_t* bytes = cache_.head(head.layer, head.table[block], head.kv_head);
    return reinterpret_cast<const uint16_t*>(bytes + cache_.place(offset).key * (cache_.is_int8() ? 1 : 2));
  }

  void point_at_tiles(const CachedHead& head, int partition, int num_tokens) {
    find_ahead(head, partition, num_tokens, key_tiles_);
    for (int tile = 0; tile * kTile < num_tokens; tile++) {
      value_tiles_[(size_t)tile] = key_tiles_[(size_t)tile] + cache_.chunk_half();
    }
    if (num_tokens % 2 == 0) return;
    const size_t last = (size_t)num_tokens / kTile;
    copy_without_last(value_tiles_[last], num_tokens % kTile, values_);
    value_tiles_[last] = values_;
  }

  // Copy the values of `count` (odd) tokens with 0 for the token after them: what lies there may be NaN.
  void copy_without_last(const uint16_t* from, int count, uint16_t* to) const {
    const Ints all = broadcast_int(-1), first_of_pair = broadcast_int(0xffff);
    const int num_numbers = (count + 1) * head_dim_, last_pair = num_numbers - 2 * head_dim_;
    for (int i = 0; i < num_numbers; i += 2 * kLanes) {
      store_ints(to + i, and_bits(load_ints(from + i), i < last_pair ? all : first_of_pair));
    }
  }

  static void widen(const int8_t* from, int count, uint16_t* to) {
    for (int i = 0; i < count; i += kLanes) store_bf16(to + i, to_floats(load_int8(from + i)));
  }

  // int8 in tiles: the same order. Whole numbers up to 127 are exact in bfloat16, those not yet written included.
  void expand(const CachedHead& head, int position, const uint16_t* ahead, uint16_t* keys, uint16_t* values) {
    const uint8_t* bytes = bytes_at(head, position);
    const auto* numbers = reinterpret_cast<const int8_t*>(bytes);
    const int first = position % kPartition;
    const KvPlace at = cache_.place(position % cache_.block_size());
    const int8_t *from_keys = numbers + at.key, *from_values = numbers + at.value;
    const float* key_scales = reinterpret_cast<const float*>(bytes + at.key_scale);
    const float* value_scales = reinterpret_cast<const float*>(bytes + at.value_scale);
    if (ahead != nullptr) {
      for (int i = 0; i < 2; i++) prefetch(ahead + kTile * head_dim_ + i * 2 * kLanes);  // the scales
    }
    for (int i = 0; i < kTile * head_dim_; i += 2 * kLanes) {
      if (ahead != nullptr) prefetch(ahead + i);
      store_bf16(keys + i, to_floats(load_int8(from_keys + i)), to_floats(load_int8(from_keys + i + kLanes)));
      store_bf16(values + i, to_floats(load_int8(from_values + i)), to_floats(load_int8(from_values + i + kLanes)));
    }
    store(key_scales_ + first, load(key_scales));
    store(value_scales_ + first, load(value_scales));
  }

  // Rows: put the numbers of `count` tokens into the order of a tile; the rest of it is 0.
  void gather(const CachedHead& head, int position, int count, uint16_t* keys, uint16_t* values) {
    const size_t tile_bytes = (size_t)kTile * head_dim_ * sizeof(uint16_t);
    if (count < kTile) {
      std::memset(keys, 0, tile_bytes);
      std::memset(values, 0, tile_bytes);
    }
    for (int lane = 0; lane < count; lane++) {
      const uint8_t* bytes = bytes_at(head, position + lane);
      const KvPlace at = cache_.place((position + lane) % cache_.block_size());
      const uint16_t* key = reinterpret_cast<const uint16_t*>(bytes) + at.key;
      const uint16_t* value = reinterpret_cast<const uint16_t*>(bytes) + at.value;
      if (cache_.is_int8()) {
        widen(reinterpret_cast<const int8_t*>(bytes) + at.key, head_dim_, row_);
        widen(reinterpret_cast<const int8_t*>(bytes) + at.value, head_dim_, row_ + head_dim_);
        key = row_;
        value = row_ + head_dim_;
        std::memcpy(key_scales_ + position % kPartition + lane, bytes + at.key_scale, sizeof(float));
        std::memcpy(value_scales_ + position % kPartition + lane, bytes + at.value_scale, sizeof(float));
      }
      uint16_t* value_to = values + (lane / 2) * 2 * head_dim_ + lane % 2;
      for (int i = 0; i < head_dim_ / 2; i++) std::memcpy(keys + (i * kTile + lane) * 2, key + 2 * i, 4);
      for (int i = 0; i < head_dim_; i++) value_to[2 * i] = value[i];
    }
  }

  const KvCache& cache_;
  int head_dim_;
  Memory memory_;
  uint16_t *keys_, *values_;  // copies of tiles: (tiles, 16 * head_dim)
  uint16_t* row_;             // a token's key and value (2, head_dim)
  float *key_scales_, *value_scales_;
  Tiles key_tiles_{}, value_tiles_{};
};

}  // namespace pageglass
