// The C interface of the native step: what `engine/kernels/cpu/library.py` calls through ctypes.
//
// Functions that can fail return 0, or fill `error` (PgError) and return another number: 1 bad argument,
// 2 out of memory, 3 anything else. Nothing is thrown across this border and no call keeps a pointer to
// what it was given. One thread at a time may use a model. ctypes releases the GIL during each call.

#pragma once

#include <cstdint>

extern "C" {

typedef struct {
  char message[256];
} PgError;

typedef struct {
  int32_t hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim, vocab_size;
  int32_t num_positions;           // rotary tables and sequences end here
  int32_t block_size, num_blocks;  // tokens per KV block; blocks in the pool
  int32_t kv_type;                 // 0 bfloat16, 1 int8
  int32_t number_type;             // what activations are multiplied as: 0 int8 (q4, int8), 1 bfloat16, 2 float32
  int32_t num_threads;
  float rms_norm_eps;
} PgConfig;

// How a tensor's numbers are stored in the file (ggml's block formats), row by row.
enum PgStorage { PG_F32 = 0, PG_F16 = 1, PG_BF16 = 2, PG_Q4_0 = 3, PG_Q4_1 = 4, PG_Q8_0 = 5 };

// How a weight is kept for multiplication. Q4 and INT8 belong to number_type 0, BF16 to 1, F32 to 2.
// Q4 takes Q4_0 and Q4_1 only, exactly as stored; INT8 takes Q8_0 exactly, and quantises everything else in
// groups of 32 with a float16 scale.
enum PgKind { PG_KIND_Q4 = 0, PG_KIND_INT8 = 1, PG_KIND_BF16 = 2, PG_KIND_F32 = 3 };

// Linear layers. GATE_UP takes two tensors (gate, up) of one storage; the others take one. EMBED is needed
// only where embeddings are not tied (else HEAD serves both).
enum PgLinear { PG_Q = 0, PG_K = 1, PG_V = 2, PG_O = 3, PG_GATE_UP = 4, PG_DOWN = 5, PG_HEAD = 6, PG_EMBED = 7 };

// Vectors of float32. Biases and q/k norms are optional. FINAL_NORM belongs to layer 0.
enum PgVector {
  PG_ATTN_NORM = 0,
  PG_MLP_NORM = 1,
  PG_Q_NORM = 2,
  PG_K_NORM = 3,
  PG_Q_BIAS = 4,
  PG_K_BIAS = 5,
  PG_V_BIAS = 6,
  PG_O_BIAS = 7,
  PG_FINAL_NORM = 8
};

typedef struct {
  const void* data;
  int32_t storage;  // PgStorage
  int32_t rows, columns;
  int32_t rotary_heads;  // 0, or: rows of so many heads whose rotary pairs are interleaved (2 i, 2 i + 1); they
                         // are put into the order (i, i + head_dim / 2). Also for a bias (columns = 1).
} PgTensor;

enum PgWant { PG_NOTHING = 0, PG_GREEDY = 1, PG_DRAW = 2 };

// One step. Arrays are per sequence unless they say otherwise.
typedef struct {
  int32_t num_sequences;
  int32_t num_tokens;            // sum of num_scheduled
  const int32_t* token_ids;      // (num_tokens) the scheduled tokens of all sequences, one after the other
  const int32_t* num_computed;   // tokens whose KV is in the cache: position of the first scheduled token
  const int32_t* num_scheduled;  // 1 or more
  const int32_t* tables;         // all block tables, one after the other
  const int32_t* table_starts;   // (num_sequences + 1) where each table begins in `tables`, and the end
  const uint8_t* wants;          // PgWant: whether the last token's successor is wanted, and how
  const float* temperatures;     // above 0, for PG_DRAW
  const int32_t* top_ks;         // 0: off
  const double* top_ps;          // 1: off
  const double* uniforms;        // in [0, 1): decides what is drawn
  int32_t want_all_logits;       // 1: logits of every token, not only of the wanted last ones
  float* logits;                 // NULL, or room for (wanted or all tokens, vocab_size), in the order of the rows
  int32_t*
      next_token_ids;  // out: the next token, -1 where none is wanted, -2 where the largest logit is no finite number
  int64_t forward_ns, sample_ns;  // out
} PgBatch;

const char* pg_isa(void);  // "avx512", "avx512vnni", "avx2vnni" or "avx2": what this library was compiled for

void* pg_create(const PgConfig* config, PgError* error);  // NULL on failure
void pg_destroy(void* model);
int pg_set_linear(void* model, int32_t layer, int32_t which, int32_t kind, const PgTensor* tensors, int32_t num_tensors,
                  PgError* error);
int pg_set_vector(void* model, int32_t layer, int32_t which, const PgTensor* values, PgError* error);  // F32 only
int pg_set_rotary(void* model, const float* cosines, const float* sines,
                  PgError* error);  // (num_positions, head_dim / 2) each
int pg_finish(void* model,
              PgError* error);  // checks that all weights are there, allocates the KV pool (pages are taken when used)
int pg_step(void* model, PgBatch* batch, PgError* error);
int64_t pg_weight_bytes(const void* model);
int64_t pg_kv_bytes_per_block(const PgConfig* config);  // over all layers
int64_t pg_kv_bytes(const void* model);
// Nanoseconds since pg_finish spent in: embedding, norms, q k v, rotary and KV store, attention, rounding of its
// result, output layer, gate and up, down, output head, sampling (11 numbers, as the first thread sees them).
void pg_phase_ns(const void* model, int64_t* nanoseconds);
// Sampling alone, of logits (rows, vocab_size); `wants` and what follows are per row, as in PgBatch.
int pg_sample(const float* logits, int32_t rows, int32_t vocab_size, const uint8_t* wants, const float* temperatures,
              const int32_t* top_ks, const double* top_ps, const double* uniforms, int32_t* next_token_ids,
              int32_t num_threads, PgError* error);
// What this machine can do at most, now, with so many threads; takes about a second. Five numbers: int8, bfloat16 and
// float32 arithmetic in 10^9 operations per second (a multiplication and an addition are two), reading and copying of
// memory in 10^9 bytes per second (a copied byte counts twice).
int pg_measure_ceilings(int32_t num_threads, double* results, PgError* error);
void* pg_kv_data(void* model);  // the pool: (blocks, layers, kv_heads, bytes of one head of one block)
}
