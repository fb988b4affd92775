// The weights of a decoder (Llama, Qwen2, Qwen3), packed, and the checks that all are there.

#pragma once

#include <memory>
#include <string>

#include "activations.h"
#include "kv_cache.h"
#include "linear.h"
#include "rotary.h"

namespace pageglass {

constexpr int kMaxHeadDim = 256;
constexpr int kMaxThreads = 1024;
constexpr int kMaxLinear = PG_EMBED + 1;
constexpr int kMaxVector = PG_FINAL_NORM + 1;

struct Layer {
  Linear q, k, v, o, gate_up, down;
  LineVector<float> attn_norm, mlp_norm, q_norm, k_norm;  // hidden_size padded to whole groups; head_dim

  HeadNorms head_norms(float eps) const {
    return {q_norm.empty() ? nullptr : q_norm.data(), k_norm.empty() ? nullptr : k_norm.data(), eps};
  }
};

inline void check_config(const PgConfig& config) {
  const struct {
    const char* name;
    int64_t value, low, high;
  } limits[] = {
      {"hidden_size", config.hidden_size, 1, 1 << 20},
      {"intermediate_size", config.intermediate_size, 1, 1 << 20},
      {"num_layers", config.num_layers, 1, 1024},
      {"num_heads", config.num_heads, 1, 1 << 16},
      {"num_kv_heads", config.num_kv_heads, 1, 1 << 16},
      {"head_dim", config.head_dim, kLanes, kMaxHeadDim},
      {"vocab_size", config.vocab_size, 1, 1 << 24},
      {"num_positions", config.num_positions, 1, 1 << 24},
      {"block_size", config.block_size, 1, 256},
      {"num_blocks", config.num_blocks, 1, 1 << 24},
      {"kv_type", config.kv_type, 0, 1},
      {"number_type", config.number_type, 0, 2},
      {"num_threads", config.num_threads, 1, kMaxThreads},
  };
  for (const auto& limit : limits) {
    if (limit.value < limit.low || limit.value > limit.high) {
      throw BadArgument(std::string(limit.name) + " is " + std::to_string(limit.value) +
                        "; allowed: " + std::to_string(limit.low) + " to " + std::to_string(limit.high));
    }
  }
  if (config.head_dim % kLanes != 0) throw BadArgument("head_dim is not a multiple of 16");
  if (config.num_heads % config.num_kv_heads != 0) throw BadArgument("num_heads is not a multiple of num_kv_heads");
}

class Model {
 public:
  explicit Model(const PgConfig& config)
      : config_(config), pool_(config.num_threads), layers_((size_t)config.num_layers) {}

  const PgConfig& config() const { return config_; }
  Number number() const { return (Number)config_.number_type; }
  ThreadPool& pool() { return pool_; }
  const Layer& layer(int i) const { return layers_[(size_t)i]; }
  const Linear& head() const { return head_; }
  const Linear& embedding() const { return embedding_.is_set() ? embedding_ : head_; }
  const float* final_norm() const { return final_norm_.data(); }
  int64_t query_size() const { return (int64_t)config_.num_heads * config_.head_dim; }
  int64_t kv_size() const { return (int64_t)config_.num_kv_heads * config_.head_dim; }
  int64_t hidden_width() const { return round_up(config_.hidden_size, kPanel); }
  RotaryTables rotary() const { return {cosines_.data(), sines_.data()}; }
  const KvCache& cache() const { return *cache_; }
  bool is_finished() const { return cache_ != nullptr; }

  void set_linear(int32_t layer, int32_t which, int32_t kind, const PgTensor* tensors, int32_t num_tensors) {
    if (which < 0 || which >= kMaxLinear) throw BadArgument("unknown linear layer");
    const Number number = kind == PG_KIND_BF16 ? Number::kBf16 : kind == PG_KIND_F32 ? Number::kFloat32 : Number::kInt8;
    if (kind < PG_KIND_Q4 || kind > PG_KIND_F32 || number != this->number()) {
      throw BadArgument("this kind of weight does not go with the model's number_type");
    }
    if (tensors == nullptr || num_tensors != (which == PG_GATE_UP ? 2 : 1))
      throw BadArgument("wrong number of tensors");
    const Size size = size_of(which);
    if (tensors[0].rows != size.outputs || tensors[0].columns != size.inputs) {
      throw BadArgument("a weight is " + std::to_string(tensors[0].rows) + " x " + std::to_string(tensors[0].columns) +
                        ", expected " + std::to_string(size.outputs) + " x " + std::to_string(size.inputs));
    }
    Linear& linear = place_of(layer, which);
    LineVector<float> bias = std::move(linear.bias);
    linear = pack_linear(pool_, (PgKind)kind, tensors, num_tensors);
    linear.bias = std::move(bias);
  }

  void set_vector(int32_t layer, int32_t which, const PgTensor& values) {
    if (which < 0 || which >= kMaxVector) throw BadArgument("unknown vector");
    check_source(values, PG_KIND_F32);
    const int64_t size = vector_size(which);
    if (values.storage != PG_F32 || values.columns != 1 || values.rows != size) {
      throw BadArgument("a vector has " + std::to_string(values.rows) + " numbers, expected " + std::to_string(size) +
                        " of float32");
    }
    LineVector<float> padded((size_t)round_up(size, kPanel), 0.0f);
    const auto* numbers = static_cast<const float*>(values.data);
    for (int64_t i = 0; i < size; i++) padded[(size_t)i] = numbers[source_row(values, i)];
    vector_at(layer, which) = std::move(padded);
  }

  void set_rotary(const float* cosines, const float* sines) {
    if (cosines == nullptr || sines == nullptr) throw BadArgument("rotary tables are missing");
    const int64_t count = (int64_t)config_.num_positions * (config_.head_dim / 2);
    cosines_.assign(cosines, cosines + count);
    sines_.assign(sines, sines + count);
  }

  void finish() {
    for (int32_t i = 0; i < config_.num_layers; i++) {
      for (int32_t which = PG_Q; which <= PG_DOWN; which++)
        require(place_of(i, which).is_set(), "a weight of layer ", i);
      require(!layers_[(size_t)i].attn_norm.empty() && !layers_[(size_t)i].mlp_norm.empty(), "a norm of layer ", i);
    }
    require(head_.is_set() && !final_norm_.empty() && !cosines_.empty(), "head, final norm or rotary tables", -1);
    cache_ = std::make_unique<KvCache>(config_);
  }

  int64_t weight_bytes() const {
    int64_t bytes = head_.data.num_bytes() + embedding_.data.num_bytes();
    for (const Layer& layer : layers_) {
      for (const Linear* linear : {&layer.q, &layer.k, &layer.v, &layer.o, &layer.gate_up, &layer.down})
        bytes += linear->data.num_bytes();
    }
    return bytes;
  }

 private:
  struct Size {
    int64_t outputs, inputs;
  };

  static void require(bool is_there, const char* what, int32_t layer) {
    if (!is_there) throw BadArgument(std::string("missing: ") + what + (layer < 0 ? "" : std::to_string(layer)));
  }

  Size size_of(int32_t which) const {
    switch (which) {
      case PG_Q: return {query_size(), config_.hidden_size};
      case PG_K:
      case PG_V: return {kv_size(), config_.hidden_size};
      case PG_O: return {config_.hidden_size, query_size()};
      case PG_GATE_UP: return {config_.intermediate_size, config_.hidden_size};
      case PG_DOWN: return {config_.hidden_size, config_.intermediate_size};
      default: return {config_.vocab_size, config_.hidden_size};
    }
  }

  Layer& checked_layer(int32_t i) {
    if (i < 0 || i >= config_.num_layers) throw BadArgument("no layer " + std::to_string(i));
    return layers_[(size_t)i];
  }

  Linear& place_of(int32_t i, int32_t which) {
    if (which == PG_HEAD) return head_;
    if (which == PG_EMBED) return embedding_;
    Layer& layer = checked_layer(i);
    switch (which) {
      case PG_Q: return layer.q;
      case PG_K: return layer.k;
      case PG_V: return layer.v;
      case PG_O: return layer.o;
      case PG_GATE_UP: return layer.gate_up;
      default: return layer.down;
    }
  }

  int64_t vector_size(int32_t which) const {
    switch (which) {
      case PG_Q_NORM:
      case PG_K_NORM: return config_.head_dim;
      case PG_Q_BIAS: return query_size();
      case PG_K_BIAS:
      case PG_V_BIAS: return kv_size();
      default: return config_.hidden_size;
    }
  }

  LineVector<float>& vector_at(int32_t i, int32_t which) {
    if (which == PG_FINAL_NORM) return final_norm_;
    Layer& layer = checked_layer(i);
    switch (which) {
      case PG_ATTN_NORM: return layer.attn_norm;
      case PG_MLP_NORM: return layer.mlp_norm;
      case PG_Q_NORM: return layer.q_norm;
      case PG_K_NORM: return layer.k_norm;
      case PG_Q_BIAS: return layer.q.bias;
      case PG_K_BIAS: return layer.k.bias;
      case PG_V_BIAS: return layer.v.bias;
      default: return layer.o.bias;
    }
  }

  const PgConfig config_;
  ThreadPool pool_;
  std::vector<Layer> layers_;
  Linear head_, embedding_;
  LineVector<float> final_norm_, cosines_, sines_;
  std::unique_ptr<KvCache> cache_;
};

}  // namespace pageglass
