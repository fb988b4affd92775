// `Step`, the phases of a layer and what comes before and after the layers.

#pragma once

#include "step.h"

namespace pageglass {

inline void Step::compute() {
  phase_started_ = now_ns();
  sample_ns_ = 0;
  embed();
  Active active{num_rows_, hidden_rows_.data()};
  for (int i = 0; i < config_.num_layers; i++) {
    const Layer& layer = model_.layer(i);
    const bool is_last = i + 1 == config_.num_layers;
    compute_qkv(active, normalise(active, layer.attn_norm.data()), layer);
    store_rows(i, is_last);
    if (is_last && wanted_.empty()) break;
    attention_.run(model_.pool(), is_last ? wanted_plan_ : plan_, i, queries_.data(), attended_.data());
    end_phase(kAttention);
    if (is_last) active = keep_wanted();
    add_product(active, take_attention(active), layer.o, kOutput);
    compute_gate_up(active, normalise(active, layer.mlp_norm.data()), layer.gate_up);
    add_product(active, product_, layer.down, kDown);
  }
  if (!wanted_.empty()) compute_head(normalise(active, model_.final_norm()));
  if (writes_logits_) sample();
}

inline void Step::embed() {
  const int64_t width = model_.hidden_width();
  model_.pool().parallel(num_rows_, kElementPiece, [&](int64_t first, int64_t last, int) {
    for (int64_t r = first; r < last; r++)
      read_output(model_.embedding(), batch_->token_ids[r], hidden_rows_.data() + r * width);
  });
  end_phase(kEmbed);
}

// Put rows into the form in which `x` is multiplied: put(row) rounds one.
template <class Put>
void Step::round_rows(const Active& active, Activations& x, const Put& put) {
  x.set_shifted(active.num_rows > kDirectRows);
  model_.pool().parallel(active.num_rows, kElementPiece, [&](int64_t first, int64_t last, int) {
    for (int64_t r = first; r < last; r++) put(r);
  });
}

inline const Activations& Step::normalise(const Active& active, const float* weight) {
  const int64_t width = model_.hidden_width();
  round_rows(active, normed_, [&](int64_t r) {
    normalise_row(active.hidden + r * width, weight, config_.hidden_size, config_.rms_norm_eps, r, normed_);
  });
  end_phase(kNorm);
  return normed_;
}

// What attention gave, as the input of the output layer.
inline const Activations& Step::take_attention(const Active& active) {
  const int64_t size = model_.query_size();
  round_rows(active, attended_rounded_,
             [&](int64_t r) { attended_rounded_.put_row(r, attended_.data() + r * size, size); });
  end_phase(kCombine);
  return attended_rounded_;
}

// The last layer goes on with the wanted rows alone.
inline Step::Active Step::keep_wanted() {
  const int64_t width = model_.hidden_width();
  model_.pool().parallel((int64_t)wanted_.size(), kElementPiece, [&](int64_t first, int64_t last, int) {
    for (int64_t r = first; r < last; r++) {
      std::copy_n(hidden_rows_.data() + wanted_[(size_t)r] * width, width, wanted_hidden_.data() + r * width);
    }
  });
  return {(int64_t)wanted_.size(), wanted_hidden_.data()};
}

// Panels that a thread takes at a time. With few rows a panel is read as fast as it comes, and adjacent ones are one
// stream of memory; with many, single panels are shared out more evenly.
inline int64_t Step::piece_of(int64_t num_panels, int64_t num_rows) const {
  return num_rows > kStreamedRows ? 1 : std::max<int64_t>(1, num_panels / (4 * config_.num_threads));
}

// Call body(panel, rows, thread) so that every panel meets all rows.
template <class Body>
void Step::for_panels(int64_t num_panels, const Active& active, const Body& body) {
  ThreadPool& pool = model_.pool();
  const int64_t num_rows = active.num_rows, num_threads = pool.num_threads();
  if (num_threads == 1 || num_rows < kOwnRows * num_threads) {
    pool.parallel(num_panels, piece_of(num_panels, num_rows), [&](int64_t first, int64_t last, int thread) {
      for (int64_t p = first; p < last; p++) body(p, RowRange{0, num_rows}, thread);
    });
    return;
  }
  pool.parallel(num_threads * num_panels, 1, [&](int64_t first, int64_t last, int thread) {
    for (int64_t i = first; i < last; i++) {
      const int owner = (int)(i / num_panels);  // of the same rows as in phases that go row by row
      body(i % num_panels,
           RowRange{pool.share_begin(owner, num_rows, kElementPiece),
                    pool.share_begin(owner + 1, num_rows, kElementPiece)},
           thread);
    }
  });
}

// Add the bias of panel `p`, if there is one.
inline void add_bias(const Linear& linear, int64_t p, Floats& left, Floats& right) {
  if (linear.bias.empty()) return;
  left = add(left, load(linear.bias.data() + p * kPanel));
  right = add(right, load(linear.bias.data() + p * kPanel + kLanes));
}

inline void Step::compute_qkv(const Active& active, const Activations& x, const Layer& layer) {
  const struct {
    const Linear& linear;
    float* out;
  } parts[] = {{layer.q, q_.data()}, {layer.k, k_.data()}, {layer.v, v_.data()}};
  const int64_t num_panels = layer.q.num_panels + layer.k.num_panels + layer.v.num_panels;
  for_panels(num_panels, active, [&](int64_t panel, RowRange rows, int thread) {
    int64_t p = panel;
    int part = 0;
    while (p >= parts[part].linear.num_panels) p -= parts[part++].linear.num_panels;
    const Linear& linear = parts[part].linear;
    float* out = parts[part].out;
    multiply_panel(x, rows, linear, p, spread_of(thread), [&](int64_t row, Floats left, Floats right) {
      add_bias(linear, p, left, right);
      store(out + row * linear.width() + p * kPanel, left);
      store(out + row * linear.width() + p * kPanel + kLanes, right);
    });
  });
  end_phase(kQkv);
}

// Whether row `r` and the next, before `end`, are tokens whose keys and values go to one pair of the cache.
inline bool Step::is_pair(int64_t r, int64_t end) const {
  return model_.cache().has_token_pairs() && r + 1 < end && rows_.positions[(size_t)r] % 2 == 0 &&
         rows_.sequences[(size_t)r] == rows_.sequences[(size_t)r + 1];
}

// Keys and values to the cache, queries to where attention reads them; in the last layer only the wanted ones'.
inline void Step::store_rows(int layer, bool is_last) {
  const Layer& weights = model_.layer(layer);
  const HeadNorms norms = weights.head_norms(config_.rms_norm_eps);
  const KvCache& cache = model_.cache();
  model_.pool().parallel(num_rows_, kElementPiece, [&](int64_t first, int64_t last, int) {
    for (int64_t r = first; r < last; r++) {
      const int offset = rows_.positions[(size_t)r] % cache.block_size();
      // The next token of a sequence goes to the same lines, until its tile is full.
      const bool is_new =
          r == first || rows_.sequences[(size_t)r] != rows_.sequences[(size_t)r - 1] || offset % kTile == 0;
      if (is_new) cache.fetch(layer, blocks_[(size_t)r], offset);
    }
    for (int64_t r = first; r < last; r++) {
      const int64_t to = is_last ? wanted_at_[(size_t)r] : r;
      if (to < 0) continue;
      preparer_.prepare_query(q_.data() + r * weights.q.width(), rows_.positions[(size_t)r], norms,
                              queries_.data() + to * model_.query_size());
    }
    const int64_t width = weights.k.width();
    for (int64_t r = first, next; r < last; r = next) {
      const int position = rows_.positions[(size_t)r], block = blocks_[(size_t)r];
      next = r + (is_pair(r, last) ? 2 : 1);
      if (next == r + 2) {
        preparer_.store_two(k_.data() + r * width, v_.data() + r * width, width, position, norms, cache, layer, block);
      } else {
        preparer_.store_keys_and_values(k_.data() + r * width, v_.data() + r * width, position, norms, cache, layer,
                                        block);
      }
    }
  });
  end_phase(kRotary);
}

// Add a product to the residual stream.
inline void Step::add_product(const Active& active, const Activations& x, const Linear& linear, Phase phase) {
  const int64_t width = model_.hidden_width();
  for_panels(linear.num_panels, active, [&](int64_t p, RowRange rows, int thread) {
    multiply_panel(x, rows, linear, p, spread_of(thread), [&](int64_t row, Floats left, Floats right) {
      float* at = active.hidden + row * width + p * kPanel;
      add_bias(linear, p, left, right);
      store(at, add(load(at), left));
      store(at + kLanes, add(load(at + kLanes), right));
    });
  });
  end_phase(phase);
}

// silu(gate) * up, rounded as the down layer's input. Two panels give 32 columns of it: a whole group. All rows of both
// come first: what follows is long chains of few instructions, which the processor overlaps if nothing is between them.
inline void Step::compute_gate_up(const Active& active, const Activations& x, const Linear& linear) {
  product_.set_shifted(active.num_rows > kDirectRows);
  for_panels(linear.num_panels / 2, active, [&](int64_t pair, RowRange rows, int thread) {
    float* gated = gated_[(size_t)thread].data();
    for (int64_t side = 0; side < 2; side++) {
      multiply_panel(x, rows, linear, 2 * pair + side, spread_of(thread), [&](int64_t row, Floats gate, Floats up) {
        float* at = gated + (2 * row + side) * kPanel;
        store(at, gate);
        store(at + kLanes, up);
      });
    }
    for (int64_t r = rows.first; r < rows.last; r++) {
      const float* left = gated + 2 * r * kPanel;
      const float* right = left + kPanel;
      product_.put_group(r, pair, mul(silu(load(left)), load(left + kLanes)),
                         mul(silu(load(right)), load(right + kLanes)));
    }
  });
  end_phase(kGateUp);
}

// Logits of the vocabulary's tokens from `first` on: what is behind its end does not count.
inline void Step::keep_best(Best& seen, Floats logits, int64_t first) const {
  const int64_t num_lanes = config_.vocab_size - first;
  if (num_lanes < kLanes) {
    logits =
        first_lanes(logits, (int)std::max<int64_t>(0, num_lanes), broadcast(-std::numeric_limits<float>::infinity()));
  }
  keep_greater(seen.value, seen.token, logits, lane_numbers((int32_t)first));
  seen.has_nan = seen.has_nan || lanes_with_nan(logits) != 0;
}

// Logits of the wanted rows, or no more than the best of each: 64 rows of 49,152 logits are 12 MB to write and read.
inline void Step::compute_head(const Activations& x) {
  const Linear& head = model_.head();
  const Floats none = broadcast(-std::numeric_limits<float>::infinity());
  if (!writes_logits_) {
    for (size_t i = 0; i < wanted_.size() * (size_t)config_.num_threads; i++)
      best_[i] = {none, broadcast_int(0), false};
  }
  model_.pool().parallel(head.num_panels, 8, [&](int64_t first, int64_t last, int thread) {
    for (int64_t p = first; p < last; p++) {
      multiply_panel(x, {0, (int64_t)wanted_.size()}, head, p, spread_of(thread),
                     [&](int64_t row, Floats left, Floats right) {
                       if (writes_logits_) {
                         store(logits_.data() + row * head.width() + p * kPanel, left);
                         store(logits_.data() + row * head.width() + p * kPanel + kLanes, right);
                         return;
                       }
                       Best& seen = best_[(size_t)thread * wanted_.size() + (size_t)row];
                       keep_best(seen, left, p * kPanel);
                       keep_best(seen, right, p * kPanel + kLanes);
                     });
    }
  });
  end_phase(kHead);
}

inline void Step::sample() {
  const PgBatch& batch = *batch_;
  const int64_t width = model_.head().width();
  const SamplingBatch rows{batch.num_sequences, config_.vocab_size, batch.wants,   batch.temperatures,
                           batch.top_ks,        batch.top_ps,       batch.uniforms};
  const auto row_of = [&](int64_t s) { return logits_.data() + logits_row_[(size_t)s] * width; };
  draw_rows(model_.pool(), rows, row_of, draw_scratch_, batch.next_token_ids);
  if (batch.logits != nullptr) {
    model_.pool().parallel((int64_t)wanted_.size(), 1, [&](int64_t first, int64_t last, int) {
      for (int64_t r = first; r < last; r++) {
        std::copy_n(logits_.data() + r * width, config_.vocab_size, batch.logits + r * config_.vocab_size);
      }
    });
  }
  sample_ns_ = now_ns() - phase_started_;
  end_phase(kSample);
}

}  // namespace pageglass
