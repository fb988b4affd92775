// The only translation unit: the C interface over a model and its step.

#include "api.h"

#include <memory>

#include "ceilings.h"
#include "model.h"
#include "sampling.h"
#include "step.h"

namespace {

using namespace pageglass;

struct Handle {
  explicit Handle(const PgConfig& config) : model(config) {}
  Model model;
  std::unique_ptr<Step> step;
};

enum Outcome { kDone = 0, kBadArgument = 1, kOutOfMemory = 2, kFailed = 3 };

int fill(PgError* error, Outcome outcome, const char* message) {
  if (error != nullptr) {
    std::strncpy(error->message, message, sizeof error->message - 1);
    error->message[sizeof error->message - 1] = '\0';
  }
  return outcome;
}

// Run `action`; nothing that it throws leaves the library.
template <class Action>
int guarded(PgError* error, const Action& action) {
  try {
    action();
    return kDone;
  } catch (const BadArgument& problem) {
    return fill(error, kBadArgument, problem.what());
  } catch (const std::bad_alloc&) {
    return fill(error, kOutOfMemory, "not enough memory");
  } catch (const std::exception& problem) {
    return fill(error, kFailed, problem.what());
  }
}

template <class T>
T& checked(void* pointer) {
  if (pointer == nullptr) throw BadArgument("no model");
  return *static_cast<T*>(pointer);
}

}  // namespace

const char* pg_isa(void) {
#if defined(__AVX512BF16__)
  return "avx512";
#elif defined(__AVX512F__)
  return "avx512vnni";
#elif defined(__AVXVNNI__)
  return "avx2vnni";
#else
  return "avx2";
#endif
}

void* pg_create(const PgConfig* config, PgError* error) {
  void* handle = nullptr;
  guarded(error, [&] {
    check_config(checked<const PgConfig>(const_cast<PgConfig*>(config)));
    handle = new Handle(*config);
  });
  return handle;
}

void pg_destroy(void* model) { delete static_cast<Handle*>(model); }

int pg_set_linear(void* model, int32_t layer, int32_t which, int32_t kind, const PgTensor* tensors, int32_t num_tensors,
                  PgError* error) {
  return guarded(error, [&] { checked<Handle>(model).model.set_linear(layer, which, kind, tensors, num_tensors); });
}

int pg_set_vector(void* model, int32_t layer, int32_t which, const PgTensor* values, PgError* error) {
  return guarded(error, [&] {
    checked<Handle>(model).model.set_vector(layer, which, checked<const PgTensor>(const_cast<PgTensor*>(values)));
  });
}

int pg_set_rotary(void* model, const float* cosines, const float* sines, PgError* error) {
  return guarded(error, [&] { checked<Handle>(model).model.set_rotary(cosines, sines); });
}

int pg_finish(void* model, PgError* error) {
  return guarded(error, [&] {
    Handle& handle = checked<Handle>(model);
    handle.model.finish();
    handle.step = std::make_unique<Step>(handle.model);
  });
}

int pg_step(void* model, PgBatch* batch, PgError* error) {
  return guarded(error, [&] {
    Handle& handle = checked<Handle>(model);
    if (handle.step == nullptr) throw BadArgument("the model is not finished");
    handle.step->run(checked<PgBatch>(batch));
  });
}

int64_t pg_weight_bytes(const void* model) { return static_cast<const Handle*>(model)->model.weight_bytes(); }

int64_t pg_kv_bytes_per_block(const PgConfig* config) { return KvCache::bytes_per_block(*config); }

int64_t pg_kv_bytes(const void* model) {
  const Model& it = static_cast<const Handle*>(model)->model;
  return it.is_finished() ? it.cache().num_bytes() : 0;
}

void* pg_kv_data(void* model) {
  const Model& it = static_cast<Handle*>(model)->model;
  return it.is_finished() ? it.cache().data() : nullptr;
}

void pg_phase_ns(const void* model, int64_t* nanoseconds) {
  const auto& step = static_cast<const Handle*>(model)->step;
  for (int i = 0; i < kNumPhases; i++) nanoseconds[i] = step == nullptr ? 0 : step->phase_ns()[i];
}

int pg_sample(const float* logits, int32_t rows, int32_t vocab_size, const uint8_t* wants, const float* temperatures,
              const int32_t* top_ks, const double* top_ps, const double* uniforms, int32_t* next_token_ids,
              int32_t num_threads, PgError* error) {
  return guarded(error, [&] {
    sample_rows(logits, {rows, vocab_size, wants, temperatures, top_ks, top_ps, uniforms}, next_token_ids, num_threads);
  });
}

int pg_measure_ceilings(int32_t num_threads, double* results, PgError* error) {
  return guarded(error, [&] {
    if (num_threads < 1 || num_threads > kMaxThreads) throw BadArgument("num_threads is out of range");
    if (results == nullptr) throw BadArgument("results is missing");
    const Ceilings found = CeilingMeter(num_threads).measure();
    const double numbers[] = {found.int8_gops, found.bf16_gflops, found.fp32_gflops, found.read_gb_s, found.copy_gb_s};
    std::copy(std::begin(numbers), std::end(numbers), results);
  });
}
