// One step of a decoder: embedding, all layers, final norm, output head and sampling, in one call.
//
// Rows are the scheduled tokens of all sequences. A phase is a `ThreadPool::parallel` over rows, panels of a weight
// or pieces of attention.
//
// The last layer matters only to rows whose logits are wanted: their queries attend, and the rest of the layer
// sees nothing but them.

#pragma once

#include <chrono>

#include "activations.h"
#include "attention.h"
#include "model.h"
#include "multiply.h"
#include "sampling.h"

namespace pageglass {

constexpr int64_t kElementPiece = 4;  // rows that one thread rounds at a time

// With so many rows for each thread, products are shared out by rows, and not by panels of the weight. Each thread then
// goes through all of the weight, but finds in its own cache what it wrote of its rows in the phase before. (Measured
// with two threads, 256 rows: 0.88 of the time where the cores have caches of their own, 0.99 where they share one.
// With 32 rows each, where spreading a panel's codes counts, 0.96 and 1.03.)
constexpr int64_t kOwnRows = 48;

inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Where a step's time goes, in nanoseconds since the model was made, as thread 0 sees it.
enum Phase { kEmbed, kNorm, kQkv, kRotary, kAttention, kCombine, kOutput, kGateUp, kDown, kHead, kSample, kNumPhases };

// The largest logit of a row that one thread has seen, per lane.
struct alignas(64) Best {
  Floats value;
  Ints token;
  bool has_nan;
};

class Step {
 public:
  explicit Step(Model& model)
      : model_(model),
        config_(model.config()),
        preparer_(config_.num_heads, config_.head_dim, model.rotary()),
        attention_(model.cache(), config_.num_heads, config_.num_threads),
        plan_(shape_of(config_)),
        wanted_plan_(shape_of(config_)) {
    const int64_t inputs = std::max(round_up(config_.hidden_size, kGroup), round_up(config_.intermediate_size, kGroup));
    const int64_t spread_bytes = std::max(inputs, round_up(model.query_size(), kGroup)) / kGroup * kSpreadGroupBytes;
    for (int i = 0; i < config_.num_threads; i++) {
      spread_.emplace_back(spread_bytes);
      draw_scratch_.emplace_back(config_.vocab_size);
    }
  }

  void run(PgBatch& batch) {
    check_batch(batch);
    FlushDenormals flush;  // from here on: a tiny top_p is above 0
    batch_ = &batch;
    reserve(batch.num_tokens);
    list_rows();
    plan_.build(rows_, batch.tables, batch.table_starts);
    wanted_plan_.build(wanted_rows_, batch.tables, batch.table_starts);
    const int64_t started = now_ns();
    compute();
    if (!writes_logits_) take_best();
    const int64_t ended = now_ns();
    batch.sample_ns = sample_ns_;
    batch.forward_ns = ended - started - sample_ns_;
  }

  const int64_t* phase_ns() const { return phase_ns_; }

 private:
  // The rows that a phase computes: all, or the wanted ones. `hidden`: their residual stream.
  struct Active {
    int64_t num_rows;
    float* hidden;
  };

  // ---- getting ready, in the calling thread -------------------------------------------------------------

  void check_batch(const PgBatch& batch) const;
  void reserve(int64_t num_rows);
  void list_rows();
  static AttentionShape shape_of(const PgConfig& config) {
    return {config.num_heads, config.num_kv_heads, config.head_dim, config.block_size, config.num_threads};
  }

  // ---- phases ----------------------------------------------------------------------------

  void compute();
  void embed();
  int64_t piece_of(int64_t num_panels, int64_t num_rows) const;
  template <class Body>
  void for_panels(int64_t num_panels, const Active& active, const Body& body);
  template <class Put>
  void round_rows(const Active& active, Activations& x, const Put& put);
  const Activations& normalise(const Active& active, const float* weight);
  void compute_qkv(const Active& active, const Activations& x, const Layer& layer);
  bool is_pair(int64_t r, int64_t end) const;
  void store_rows(int layer, bool is_last);
  Active keep_wanted();
  const Activations& take_attention(const Active& active);
  void add_product(const Active& active, const Activations& x, const Linear& linear, Phase phase);
  void compute_gate_up(const Active& active, const Activations& x, const Linear& linear);
  void keep_best(Best& seen, Floats logits, int64_t first) const;
  void compute_head(const Activations& x);
  void sample();
  void take_best();

  uint8_t* spread_of(int thread) const { return spread_[(size_t)thread].as<uint8_t>(); }
  void end_phase(Phase phase) {
    const int64_t now = now_ns();
    phase_ns_[phase] += now - phase_started_;
    phase_started_ = now;
  }

  Model& model_;
  const PgConfig& config_;
  PgBatch* batch_ = nullptr;

  // rows of the step
  int64_t num_rows_ = 0, capacity_ = 0;
  Rows rows_, wanted_rows_;          // all, and those whose logits are wanted
  std::vector<int32_t> blocks_;      // (num_rows) the block that a row's KV goes to
  std::vector<int32_t> wanted_;      // (wanted) index of a wanted row among all
  std::vector<int32_t> wanted_at_;   // (num_rows) place of a row in `wanted_`, or -1
  std::vector<int32_t> logits_row_;  // (num_sequences) place of its last row in `wanted_`, or -1
  bool writes_logits_ = false;

  // numbers of the step; rows of float32 are padded to whole panels
  LineVector<float> hidden_rows_, wanted_hidden_, q_, k_, v_, attended_, logits_;
  LineVector<uint16_t> queries_;
  Activations normed_, attended_rounded_, product_;  // what layers multiply; `product_`: of the MLP's two branches
  std::vector<Best> best_;                           // (threads, wanted)

  // per thread
  std::vector<Memory> spread_;
  std::vector<LineVector<float>> gated_;  // two panels of products for all rows
  std::vector<DrawScratch> draw_scratch_;

  RowPreparer preparer_;
  Attention attention_;
  AttentionPlan plan_, wanted_plan_;

  int64_t phase_ns_[kNumPhases] = {};
  int64_t phase_started_ = 0, sample_ns_ = 0;
};

}  // namespace pageglass

#include "step_phases.h"
#include "step_rows.h"
