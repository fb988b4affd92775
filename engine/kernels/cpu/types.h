// Shapes and small structs that the kernels share.

#pragma once

#include <cstdint>
#include <cstring>
#include <new>
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

constexpr int64_t kLine = 64;  // bytes of a cache line

template <class T>
struct LineAllocator {
  static constexpr std::align_val_t kAlignment{(size_t)kLine};
  using value_type = T;
  LineAllocator() = default;
  template <class Other>
  LineAllocator(const LineAllocator<Other>&) {}
  T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), kAlignment)); }
  void deallocate(T* p, size_t) { ::operator delete(p, kAlignment); }
  bool operator==(const LineAllocator&) const { return true; }
  bool operator!=(const LineAllocator&) const { return false; }
};

// A vector that begins on a cache line: 64 bytes across two lines take twice as long to load, and longer to store.
// (Large allocations of the C library begin 16 bytes after one.)
template <class T>
using LineVector = std::vector<T, LineAllocator<T>>;

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
