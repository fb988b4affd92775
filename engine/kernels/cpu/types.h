// Shapes and small structs that the kernels share.

#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "api.h"

namespace pageglass {

constexpr int kGroup = 32;  // numbers that share a quantisation scale
constexpr int kPanel = 32;  // columns (outputs) of a weight that are multiplied together
constexpr int kPartition =
    256;  // keys whose attention is computed apart; fixed, so that results depend on positions only

struct BadArgument : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
inline int64_t divide_up(int64_t n, int64_t by) { return (n + by - 1) / by; }

template <class T>
T read_as(const uint8_t* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

// Memory that starts on a cache line (2 MiB and huge pages for large ones), zeroed by the system when first used.
class Memory {
 public:
  Memory() = default;
  explicit Memory(int64_t num_bytes);
  ~Memory();
  Memory(Memory&& other) noexcept : data_(other.data_), num_bytes_(other.num_bytes_) {
    other.data_ = nullptr;
    other.num_bytes_ = 0;
  }
  Memory& operator=(Memory&& other) noexcept;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  int64_t num_bytes() const { return num_bytes_; }

 private:
  void* data_ = nullptr;
  int64_t num_bytes_ = 0;
};

// Rows of one step. Tokens of a sequence are adjacent rows, in order.
struct Rows {
  int num_rows = 0;
  std::vector<int32_t> positions;  // (num_rows)
  std::vector<int32_t> sequences;  // (num_rows) index into the batch
};

}  // namespace pageglass
