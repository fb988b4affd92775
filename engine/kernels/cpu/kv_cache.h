// The pool of keys and values: (blocks, layers, kv heads, bytes of one head of one block). All of a block lies
// together: a first request takes a few pages of memory and not some in each layer, and a block is copied in one piece.
//
// Attention works on tiles of 16 tokens. In a tile of keys the pairs of dimensions are interleaved, lanes are
// tokens: (head_dim / 2, 16, 2). In a tile of values the pairs of tokens are interleaved, lanes are
// dimensions: (8, head_dim, 2). Both hold 16 * head_dim numbers.
//
// Where block_size is a multiple of 16 a block is a sequence of chunks of 16 tokens: a tile of keys, then one of
// values. Otherwise a tile can span blocks: a chunk is one token's key and value (head_dim each), and tiles are
// gathered before they are used.
//
// Numbers are bfloat16 or, in int8, whole numbers in [-127, 127] times a float32 scale per token and head: a chunk then
// ends with the scales of its keys, and those of its values.

#pragma once

#include <cfloat>
#include <cmath>
#include <limits>

#include "memory.h"
#include "simd.h"
#include "types.h"

namespace pageglass {

constexpr int kTile = 16;  // tokens whose scores are one vector

enum class KvType { kBf16 = 0, kInt8 = 1 };

// Where a token's numbers lie in a head of its block, counted in numbers (int8: in bytes).
struct KvPlace {
  int64_t key, value;              // the first number
  int key_step;                    // from one pair of dimensions of a key to the next
  int value_step;                  // from one dimension of a value to the next
  int64_t key_scale, value_scale;  // int8 only
};

// Into the second-level cache, which can wait for more lines at a time than the first (measured on Zen 4: 1.5 times
// the bytes per second from scattered blocks).
inline void prefetch(const void* address) { _mm_prefetch((const char*)address, _MM_HINT_T1); }

class KvCache {
 public:
  // Takes address space for the whole pool; pages are taken when they are written.
  explicit KvCache(const PgConfig& config)
      : head_dim_(config.head_dim),
        num_kv_heads_(config.num_kv_heads),
        block_size_(config.block_size),
        num_blocks_(config.num_blocks),
        num_layers_(config.num_layers),
        type_((KvType)config.kv_type),
        head_bytes_(bytes_per_head(config)),
        memory_(bytes_per_block(config) * config.num_blocks) {}

  // Bytes of one head of one block in one layer: whole cache lines.
  static int64_t bytes_per_head(const PgConfig& config) {
    const bool is_int8 = config.kv_type == (int)KvType::kInt8;
    const int64_t bytes_per_pair = is_int8 ? 2 : 4, scales = is_int8 ? 2 * (int64_t)sizeof(float) : 0;
    const int64_t bytes_per_token = config.head_dim * bytes_per_pair + scales;
    return round_up(config.block_size * bytes_per_token, 64);
  }
  // Bytes of one block over all layers and heads.
  static int64_t bytes_per_block(const PgConfig& config) {
    return bytes_per_head(config) * config.num_kv_heads * config.num_layers;
  }

  int head_dim() const { return head_dim_; }
  int num_kv_heads() const { return num_kv_heads_; }
  int block_size() const { return block_size_; }
  int num_blocks() const { return num_blocks_; }
  int64_t num_bytes() const { return memory_.num_bytes(); }
  void* data() const { return memory_.as<void>(); }
  bool is_int8() const { return type_ == KvType::kInt8; }
  // Whether blocks hold tiles, not rows.
  bool is_tiled() const { return block_size_ % kTile == 0; }
  // Whether `write_two` can be used.
  bool has_token_pairs() const { return is_tiled() && !is_int8(); }

  uint8_t* head(int layer, int block, int kv_head) const {
    return memory_.as<uint8_t>() + (((int64_t)block * num_layers_ + layer) * num_kv_heads_ + kv_head) * head_bytes_;
  }

  // Numbers in a chunk's keys, and as many in its values.
  int64_t chunk_half() const { return (int64_t)chunk_tokens() * head_dim_; }

  // From one chunk to the next, in numbers.
  int64_t chunk_size() const {
    return 2 * chunk_half() + (is_int8() ? 2 * chunk_tokens() * (int64_t)sizeof(float) : 0);
  }

  KvPlace place(int offset) const {
    const int tokens = chunk_tokens(), lane = offset % tokens;
    const int64_t chunk = offset / tokens * chunk_size(), values = chunk + chunk_half(), scales = values + chunk_half();
    const int64_t key_scale = scales + lane * (int64_t)sizeof(float);
    const int64_t value_scale = key_scale + tokens * (int64_t)sizeof(float);
    if (!is_tiled()) return {chunk, values, 2, 1, key_scale, value_scale};
    const int64_t value = values + (int64_t)(lane / 2) * head_dim_ * 2 + lane % 2;
    return {chunk + lane * 2, value, 2 * kTile, 2, key_scale, value_scale};
  }

  // Bring near what `write` will touch for a token: in tiles a key lies in as many lines as it has pairs of dimensions.
  void fetch(int layer, int block, int offset) const {
    const KvPlace at = place(offset);
    const int size = is_int8() ? 1 : 2;
    const int64_t key_bytes = (int64_t)head_dim_ / 2 * at.key_step * size;
    const int64_t value_bytes = (int64_t)head_dim_ * at.value_step * size;
    for (int kv_head = 0; kv_head < num_kv_heads_; kv_head++) {
      const uint8_t* from = head(layer, block, kv_head);
      for (int64_t i = 0; i < key_bytes; i += kLine) prefetch(from + at.key * size + i);
      for (int64_t i = 0; i < value_bytes; i += kLine) prefetch(from + at.value * size + i);
      if (is_int8()) prefetch(from + at.key_scale);
      if (is_int8()) prefetch(from + at.value_scale);
    }
    asm volatile("");  // GCC takes a function that only prefetches for one without effect, and drops its calls
  }

  // Store one token's key and value (head_dim each) of one head.
  void write(int layer, int block, int offset, int kv_head, const float* key, const float* value) const {
    uint8_t* to = head(layer, block, kv_head);
    if (is_int8()) {
      write_int8(to, offset, key, value);
    } else {
      write_bf16(reinterpret_cast<uint16_t*>(to), offset, key, value);
    }
  }

  // The same for two tokens at `offset`, which is even, and behind it: rows of `key_step` and `value_step` numbers.
  // Values of two tokens are whole vectors, where those of one are as many stores as numbers.
  void write_two(int layer, int block, int offset, int kv_head, const float* keys, int64_t key_step,
                 const float* values, int64_t value_step) const {
    auto* to = reinterpret_cast<uint16_t*>(head(layer, block, kv_head));
    const KvPlace at = place(offset);
    write_key_bf16(to, at, keys);
    write_key_bf16(to, place(offset + 1), keys + key_step);
    for (int i = 0; i < head_dim_; i += kLanes) {
      store_ints(to + at.value + (int64_t)i * at.value_step,
                 bf16_pairs(load(values + i), load(values + value_step + i)));
    }
  }

 private:
  static constexpr int kMaxHeadDim = 256;

  int chunk_tokens() const { return is_tiled() ? kTile : 1; }

  void write_key_bf16(uint16_t* to, const KvPlace& at, const float* key) const {
    alignas(64) uint16_t numbers[kMaxHeadDim];
    for (int i = 0; i < head_dim_; i += kLanes) store_bf16(numbers + i, load(key + i));
    for (int i = 0; i < head_dim_ / 2; i++) std::memcpy(to + at.key + (int64_t)i * at.key_step, numbers + 2 * i, 4);
  }

  void write_bf16(uint16_t* to, int offset, const float* key, const float* value) const {
    alignas(64) uint16_t numbers[kMaxHeadDim];
    const KvPlace at = place(offset);
    write_key_bf16(to, at, key);
    for (int i = 0; i < head_dim_; i += kLanes) store_bf16(numbers + i, load(value + i));
    for (int i = 0; i < head_dim_; i++) to[at.value + (int64_t)i * at.value_step] = numbers[i];
  }

  void write_int8(uint8_t* head, int offset, const float* key, const float* value) const {
    alignas(64) int8_t numbers[kMaxHeadDim];
    int8_t* to = reinterpret_cast<int8_t*>(head);
    const KvPlace at = place(offset);
    const float key_scale = quantise(key, numbers);
    std::memcpy(head + at.key_scale, &key_scale, sizeof key_scale);
    for (int i = 0; i < head_dim_ / 2; i++) std::memcpy(to + at.key + (int64_t)i * at.key_step, numbers + 2 * i, 2);
    const float value_scale = quantise(value, numbers);
    std::memcpy(head + at.value_scale, &value_scale, sizeof value_scale);
    for (int i = 0; i < head_dim_; i++) to[at.value + (int64_t)i * at.value_step] = numbers[i];
  }

  // The largest magnitude becomes 127. Returns the scale: NaN where a number is none.
  float quantise(const float* from, int8_t* to) const {
    Floats largest = broadcast(0.0f);
    uint32_t broken = 0;
    for (int i = 0; i < head_dim_; i += kLanes) {
      const Floats numbers = load(from + i);
      largest = max(abs(numbers), largest);
      broken |= lanes_with_nan(numbers);
    }
    const float magnitude = reduce_max(largest);
    if (broken != 0 || !(magnitude <= FLT_MAX)) {
      std::memset(to, 0, (size_t)head_dim_);
      return std::numeric_limits<float>::quiet_NaN();
    }
    const Floats inverse = broadcast(magnitude > 0.0f ? 127.0f / magnitude : 0.0f);
    const Floats top = broadcast(127.0f), bottom = broadcast(-127.0f);
    for (int i = 0; i < head_dim_; i += kLanes) {
      store_as_int8(to + i, to_ints(max(min(mul(load(from + i), inverse), top), bottom)));
    }
    return magnitude / 127.0f;
  }

  int head_dim_, num_kv_heads_, block_size_, num_blocks_, num_layers_;
  KvType type_;
  int64_t head_bytes_;
  Memory memory_;
};

}  // namespace pageglass
