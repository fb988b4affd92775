// `Step`, part of the calling thread: checks of what came in, rows, room for their numbers.

#pragma once

#include "step.h"

namespace pageglass {

inline void Step::check_batch(const PgBatch& batch) const {
  if (batch.num_sequences < 1) throw BadArgument("num_sequences is less than 1");
  int64_t num_tokens = 0;
  for (int32_t s = 0; s < batch.num_sequences; s++) {
    const std::string who = " (sequence " + std::to_string(s) + ")";
    const int64_t computed = batch.num_computed[s], scheduled = batch.num_scheduled[s];
    if (scheduled < 1 || computed < 0) throw BadArgument("num_scheduled or num_computed is out of range" + who);
    if (computed + scheduled > config_.num_positions) throw BadArgument("positions end before the last token" + who);
    const int64_t needed = divide_up(computed + scheduled, config_.block_size);
    const int64_t begin = batch.table_starts[s], end = batch.table_starts[s + 1];
    if (begin < 0 || end - begin < needed) throw BadArgument("the block table is too short" + who);
    for (int64_t i = begin; i < begin + needed; i++) {
      if (batch.tables[i] < 0 || batch.tables[i] >= config_.num_blocks) throw BadArgument("no such block" + who);
    }
    num_tokens += scheduled;
  }
  if (num_tokens != batch.num_tokens) throw BadArgument("num_tokens is not the sum of num_scheduled");
  for (int64_t i = 0; i < num_tokens; i++) {
    if (batch.token_ids[i] < 0 || batch.token_ids[i] >= config_.vocab_size) throw BadArgument("no such token id");
  }
  check_sampling({batch.num_sequences, config_.vocab_size, batch.wants, batch.temperatures, batch.top_ks, batch.top_ps,
                  batch.uniforms});
}

// Room for so many rows; grows in powers of two, so that steady work allocates nothing.
inline void Step::reserve(int64_t num_rows) {
  num_rows_ = num_rows;
  if (num_rows <= capacity_) return;
  int64_t rows = std::max<int64_t>(capacity_, 64);
  while (rows < num_rows) rows *= 2;
  const int64_t query_width = round_up(model_.query_size(), kPanel), kv_width = round_up(model_.kv_size(), kPanel);
  const int64_t mlp_width = round_up(config_.intermediate_size, kGroup);
  hidden_rows_.assign((size_t)(rows * model_.hidden_width()), 0.0f);
  wanted_hidden_.assign((size_t)(rows * model_.hidden_width()), 0.0f);
  q_.assign((size_t)(rows * query_width), 0.0f);
  k_.assign((size_t)(rows * kv_width), 0.0f);
  v_.assign((size_t)(rows * kv_width), 0.0f);
  attended_.assign((size_t)(rows * model_.query_size() + kLanes), 0.0f);
  queries_.assign((size_t)(rows * model_.query_size()), 0);
  normed_ = Activations(model_.number(), rows, model_.hidden_width());
  attended_rounded_ = Activations(model_.number(), rows, query_width);
  product_ = Activations(model_.number(), rows, mlp_width);
  gated_.assign((size_t)config_.num_threads, LineVector<float>((size_t)(rows * 2 * kPanel)));
  capacity_ = rows;
}

inline void add_row(Rows& rows, int32_t position, int32_t sequence) {
  rows.num_rows++;
  rows.positions.push_back(position);
  rows.sequences.push_back(sequence);
}

inline void Step::list_rows() {
  const PgBatch& batch = *batch_;
  rows_ = {};
  wanted_rows_ = {};
  blocks_.clear();
  wanted_.clear();
  wanted_at_.clear();
  logits_row_.assign((size_t)batch.num_sequences, -1);
  bool draws = false;
  for (int32_t s = 0; s < batch.num_sequences; s++) {
    const int32_t* table = batch.tables + batch.table_starts[s];
    const bool wants = batch.wants[s] != PG_NOTHING;
    for (int32_t i = 0; i < batch.num_scheduled[s]; i++) {
      const int32_t position = batch.num_computed[s] + i;
      const bool is_end = i + 1 == batch.num_scheduled[s], is_wanted = batch.want_all_logits || (is_end && wants);
      wanted_at_.push_back(is_wanted ? (int32_t)wanted_.size() : -1);
      if (is_end && wants) logits_row_[(size_t)s] = wanted_at_.back();
      if (is_wanted) {
        wanted_.push_back(rows_.num_rows);
        add_row(wanted_rows_, position, s);
      }
      add_row(rows_, position, s);
      blocks_.push_back(table[position / config_.block_size]);
    }
    draws = draws || batch.wants[s] == PG_DRAW;
  }
  writes_logits_ = draws || batch.logits != nullptr;
  if (writes_logits_) {
    const size_t needed = wanted_.size() * (size_t)model_.head().width();
    if (logits_.size() < needed) logits_.resize(needed);
  } else {
    const size_t needed = wanted_.size() * (size_t)config_.num_threads;
    if (best_.size() < needed) best_.resize(needed);
  }
}

// The best token of each wanted row over all threads and lanes; of equals the one with the lowest id.
inline void Step::take_best() {
  const PgBatch& batch = *batch_;
  for (int32_t s = 0; s < batch.num_sequences; s++) {
    const int32_t row = logits_row_[(size_t)s];
    batch.next_token_ids[s] = kNoToken;
    if (row < 0) continue;
    float best = -std::numeric_limits<float>::infinity();
    bool has_nan = false;
    int32_t token = kFailedToken;
    for (int t = 0; t < config_.num_threads; t++) {
      const Best& seen = best_[(size_t)t * wanted_.size() + (size_t)row];
      float values[kLanes];
      int32_t tokens[kLanes];
      store(values, seen.value);
      store_ints(tokens, seen.token);
      has_nan = has_nan || seen.has_nan;
      for (int lane = 0; lane < kLanes; lane++) {
        if (values[lane] > best || (values[lane] == best && tokens[lane] < token)) {
          best = values[lane];
          token = tokens[lane];
        }
      }
    }
    batch.next_token_ids[s] = has_nan || !std::isfinite(best) ? kFailedToken : token;
  }
}

}  // namespace pageglass
