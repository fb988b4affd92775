// The threads of a step: the caller cuts work into pieces, and whoever has time takes the next one.
//
// The engine shares its cores with an event loop and often with a browser, so a helper can lose its core at any
// moment. The caller never waits for a helper to come, only for the pieces that helpers have begun; alone it does
// everything itself. A thread that waits spins for a moment, because work comes in quick succession, and then
// sleeps, because a thread that spins can keep the very thread off its core that it waits for.

#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "cores.h"
#include "simd.h"
#include "types.h"

namespace pageglass {

// A counter that can be waited on: spin first, then sleep in the kernel.
class Signal {
 public:
  uint32_t read() const { return value_.load(std::memory_order_acquire); }

  void advance() {
    value_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) futex(FUTEX_WAKE_PRIVATE, INT_MAX);
  }

  // Return once the value differs from `seen`.
  void wait_for_change(uint32_t seen, int spins) {
    for (int i = 0; i < spins; i++) {
      if (read() != seen) return;
      _mm_pause();
    }
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (value_.load(std::memory_order_seq_cst) == seen) futex(FUTEX_WAIT_PRIVATE, (int)seen);
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
  void futex(int operation, int argument) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&value_), operation, argument, nullptr, nullptr, 0);
  }

  alignas(64) std::atomic<uint32_t> value_{0};
  std::atomic<int> sleepers_{0};
};

class ThreadPool {
 public:
  explicit ThreadPool(int num_threads) : cores_(std::max(num_threads, 1)) {
    try {
      for (int i = 1; i < num_threads; i++) threads_.emplace_back([this, i] { serve(i); });
    } catch (const std::system_error&) {
      const int num_started = this->num_threads();
      stop();
      throw BadArgument("threads is " + std::to_string(num_threads) + ", but the system starts no more than " +
                        std::to_string(num_started));
    }
  }
  ~ThreadPool() { stop(); }
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return (int)threads_.size() + 1; }

  // Call body(first, last, thread) for pieces of [0, count) and return when all are done. `thread`, in
  // [0, num_threads), is no one else's meanwhile. The body must not throw, nor call this. One caller at a time.
  template <class Body>
  void parallel(int64_t count, int64_t piece, const Body& body) {
    if (count <= 0) return;
    FlushDenormals flush;
    if (threads_.empty() || count <= piece) {
      body((int64_t)0, count, 0);
      return;
    }
    cores_.note(0);
    open([](const void* context, int64_t first, int64_t last,
            int thread) { (*static_cast<const Body*>(context))(first, last, thread); },
         &body, count, piece);
    take_pieces(0);
    while (true) {  // the signal may be a late one, of the work before
      const uint32_t seen = finished_.read();
      if (num_done_.load(std::memory_order_acquire) == count) return;
      finished_.wait_for_change(seen, kSpins);
    }
  }

 private:
  using Task = void (*)(const void* context, int64_t first, int64_t last, int thread);

  static constexpr int kSpins = 4000;  // about 50 us: longer than most pieces, far less than a time slice
  static constexpr uint64_t kClosed = 0xffffffffu;

  // A ticket is the number of the work (high half) and the first piece that nobody has taken (low half). Whoever
  // moves it on holds a piece, and until that is done the work's description stays.
  void open(Task task, const void* context, int64_t count, int64_t piece) {
    const uint64_t number = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
    ticket_.store(number << 32 | kClosed);
    task_.store(task, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    count_.store(count, std::memory_order_relaxed);
    piece_.store(piece, std::memory_order_relaxed);
    num_done_.store(0, std::memory_order_relaxed);
    ticket_.store(number << 32);
    opened_.advance();
  }

  void stop() {
    stopping_ = true;
    opened_.advance();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

  void take_pieces(int thread) {
    while (true) {
      uint64_t ticket = ticket_.load(std::memory_order_acquire);
      const int64_t first = (int64_t)(ticket & kClosed), count = count_.load(std::memory_order_relaxed);
      if (first >= count) return;
      const Task task = task_.load(std::memory_order_relaxed);
      const void* context = context_.load(std::memory_order_relaxed);
      const int64_t last = std::min(first + piece_.load(std::memory_order_relaxed), count);
      if (!ticket_.compare_exchange_strong(ticket, (ticket & ~kClosed) | (uint64_t)last)) continue;
      task(context, first, last, thread);
      if (num_done_.fetch_add(last - first, std::memory_order_acq_rel) + last - first == count) finished_.advance();
    }
  }

  void serve(int thread) {
    FlushDenormals flush;
    while (!stopping_) {
      const uint32_t seen = opened_.read();
      cores_.keep_apart(thread);
      take_pieces(thread);
      if (!stopping_) opened_.wait_for_change(seen, kSpins);
    }
  }

  Cores cores_;
  std::vector<std::thread> threads_;
  std::atomic<bool> stopping_{false};
  Signal opened_, finished_;
  alignas(64) std::atomic<uint64_t> ticket_{kClosed};
  std::atomic<Task> task_{nullptr};
  std::atomic<const void*> context_{nullptr};
  std::atomic<int64_t> count_{0}, piece_{1};
  alignas(64) std::atomic<int64_t> num_done_{0};
};

}  // namespace pageglass
