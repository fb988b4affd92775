// From the product of the q, k and v layers to what attention reads: head norms, rotary embedding, storage.

#pragma once

#include "kv_cache.h"

namespace pageglass {

// Optional root-mean-square norms of each head of queries and keys: weights (head_dim), or null.
struct HeadNorms {
  const float* query = nullptr;
  const float* key = nullptr;
  float eps = 0.0f;
};

// Cosines and sines (num_positions, head_dim / 2) of the rotary angles; pairs are (i, i + head_dim / 2).
struct RotaryTables {
  const float* cosines = nullptr;
  const float* sines = nullptr;
};

// log2(e): attention raises 2 to its scores, so this goes into the scale of the queries.
constexpr float kLog2E = 1.44269504f;

class RowPreparer {
 public:
  RowPreparer(int num_heads, int head_dim, const RotaryTables& tables)
      : num_heads_(num_heads), head_dim_(head_dim), scale_(kLog2E / std::sqrt((float)head_dim)), tables_(tables) {}

  // Scale by 1 / sqrt(head_dim) (and log2(e)) and store as bfloat16 the rotated `from` (num_heads * head_dim).
  void prepare_query(const float* from, int position, const HeadNorms& norms, uint16_t* to) const {
    alignas(64) float rotated[kMaxHeadDim];
    const Floats scale = broadcast(scale_);
    for (int head = 0; head < num_heads_; head++, from += head_dim_, to += head_dim_) {
      rotate(from, norms.query, norms.eps, position, rotated);
      for (int i = 0; i < head_dim_; i += kLanes) store_bf16(to + i, mul(load(rotated + i), scale));
    }
  }

  // Store rotated keys and the values, (kv_heads * head_dim) each, in the cache.
  void store_keys_and_values(const float* keys, const float* values, int position, const HeadNorms& norms,
                             const KvCache& cache, int layer, int block) const {
    alignas(64) float rotated[kMaxHeadDim];
    const int offset = position % cache.block_size();
    for (int head = 0; head < cache.num_kv_heads(); head++, keys += head_dim_, values += head_dim_) {
      rotate(keys, norms.key, norms.eps, position, rotated);
      cache.write(layer, block, offset, head, rotated, values);
    }
  }

  // The same for a sequence's tokens at `position` and behind it, whose keys and values are `step` numbers apart; both
  // in one pair of the cache.
  void store_two(const float* keys, const float* values, int64_t step, int position, const HeadNorms& norms,
                 const KvCache& cache, int layer, int block) const {
    alignas(64) float rotated[2 * kMaxHeadDim];
    const int offset = position % cache.block_size();
    for (int head = 0; head < cache.num_kv_heads(); head++, keys += head_dim_, values += head_dim_) {
      rotate(keys, norms.key, norms.eps, position, rotated);
      rotate(keys + step, norms.key, norms.eps, position + 1, rotated + kMaxHeadDim);
      cache.write_two(layer, block, offset, head, rotated, kMaxHeadDim, values, step);
    }
  }

 private:
  static constexpr int kMaxHeadDim = 256;

  void rotate(const float* from, const float* norm, float eps, int position, float* to) const {
    alignas(64) float normed[kMaxHeadDim];
    const int half = head_dim_ / 2;
    const float* cosines = tables_.cosines + (int64_t)position * half;
    const float* sines = tables_.sines + (int64_t)position * half;
    if (norm != nullptr) {
      normalise(from, norm, eps, normed);
      from = normed;
    }
    // Products are rounded before they are added, in vectors or not.
    int i = 0;
    for (; i + kLanes <= half; i += kLanes) {
      const Floats left = load(from + i), right = load(from + i + half);
      const Floats cosine = load(cosines + i), sine = load(sines + i);
      store(to + i, sub(mul(left, cosine), mul(right, sine)));
      store(to + i + half, add(mul(right, cosine), mul(left, sine)));
    }
    for (; i < half; i++) {
      const float left = from[i], right = from[i + half];
      to[i] = left * cosines[i] - right * sines[i];
      to[i + half] = right * cosines[i] + left * sines[i];
    }
  }

  void normalise(const float* from, const float* weight, float eps, float* to) const {
    Floats sum = broadcast(0.0f);
    for (int i = 0; i < head_dim_; i += kLanes) sum = fma(load(from + i), load(from + i), sum);
    const Floats inverse = broadcast(1.0f / std::sqrt(reduce_add(sum) / (float)head_dim_ + eps));
    for (int i = 0; i < head_dim_; i += kLanes) {
      store(to + i, mul(mul(load(from + i), inverse), load(weight + i)));
    }
  }

  int num_heads_, head_dim_;
  float scale_;
  RotaryTables tables_;
};

}  // namespace pageglass
