// Large memory straight from the system: pages are taken when first written, huge ones where allowed.
//
// Under AddressSanitizer it comes from the heap instead, which is watched to the byte.

#pragma once

#include <sys/mman.h>

#include <cstdlib>
#include <new>

#include "types.h"

namespace pageglass {

constexpr int64_t kHugePage = 2 << 20;

#if defined(__SANITIZE_ADDRESS__)

inline Memory::Memory(int64_t num_bytes) : num_bytes_(num_bytes) {
  if (num_bytes == 0) return;
  if (posix_memalign(&data_, 64, (size_t)num_bytes) != 0) throw std::bad_alloc();
  std::memset(data_, 0, (size_t)num_bytes);
}

inline Memory::~Memory() { std::free(data_); }

#else

// Random reads of a block pool cost a page-table walk each with pages of 4 KiB: huge pages spare most of them.
inline Memory::Memory(int64_t num_bytes) : num_bytes_(num_bytes) {
  if (num_bytes == 0) return;
  void* data = mmap(nullptr, (size_t)num_bytes + kHugePage, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) throw std::bad_alloc();
  const auto address = (uintptr_t)data;
  const uintptr_t aligned = (uintptr_t)round_up((int64_t)address, kHugePage);
  const uintptr_t end = address + (uintptr_t)num_bytes + kHugePage;
  const uintptr_t used_end = (uintptr_t)round_up((int64_t)(aligned + (uintptr_t)num_bytes), 4096);
  if (aligned > address) munmap(data, aligned - address);
  if (end > used_end) munmap((void*)used_end, end - used_end);
  data_ = (void*)aligned;
  if (num_bytes >= kHugePage) madvise(data_, (size_t)num_bytes, MADV_HUGEPAGE);
}

inline Memory::~Memory() {
  if (data_ != nullptr) munmap(data_, (size_t)round_up(num_bytes_, 4096));
}

#endif

inline Memory& Memory::operator=(Memory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(num_bytes_, other.num_bytes_);
  return *this;
}

}  // namespace pageglass
