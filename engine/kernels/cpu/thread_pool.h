// The threads of a step: work is cut into pieces, and each thread has a share of them.
//
// Shares are the same for all work of a size, so that a thread finds what it wrote in its own cache: on processors
// whose cores do not all share one, a line from another core takes as long as one from memory. Who has done its own
// share helps the others, but only after a moment: one that is about to be done is not helped by taking its lines away.
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
  explicit ThreadPool(int num_threads) : cores_(std::max(num_threads, 1)), shares_((size_t)std::max(num_threads, 1)) {
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
    run(count, piece, num_threads(), body);
  }

  // The same for pieces that take unequal time: whoever has time takes the next one, in their order.
  template <class Body>
  void parallel_in_order(int64_t count, int64_t piece, const Body& body) {
    run(count, piece, 1, body);
  }

  // Where the share of a thread begins in [0, count) as `parallel` cuts it; that of `num_threads` is its end.
  int64_t share_begin(int thread, int64_t count, int64_t piece) const {
    return share_begin(thread, num_threads(), count, piece);
  }

 private:
  using Task = void (*)(const void* context, int64_t first, int64_t last, int thread);

  // A ticket is the number of the work (high half) and the first item that nobody has taken (low half). Whoever moves
  // it on holds a piece, and until that is done the work's description stays.
  struct alignas(64) Share {
    std::atomic<uint64_t> ticket{kClosed};
    std::atomic<int64_t> end{0};
  };

  static constexpr int kSpins = 4000;              // about 50 us: longer than most pieces, far less than a time slice
  static constexpr uint64_t kMaxPatience = 50000;  // ticks of the time stamp counter: about 15 us
  static constexpr uint64_t kClosed = 0xffffffffu;

  static int64_t share_begin(int share, int num_shares, int64_t count, int64_t piece) {
    return share >= num_shares ? count : divide_up(count, piece) * share / num_shares * piece;
  }

  template <class Body>
  void run(int64_t count, int64_t piece, int num_shares, const Body& body) {
    if (count <= 0) return;
    FlushDenormals flush;
    if (threads_.empty() || count <= piece) {
      body((int64_t)0, count, 0);
      return;
    }
    cores_.note(0);
    open([](const void* context, int64_t first, int64_t last,
            int thread) { (*static_cast<const Body*>(context))(first, last, thread); },
         &body, count, piece, num_shares);
    take_pieces(0, opened_.read());
    while (true) {  // the signal may be a late one, of the work before
      const uint32_t seen = finished_.read();
      if (num_done_.load(std::memory_order_acquire) == count) return;
      finished_.wait_for_change(seen, kSpins);
    }
  }

  void open(Task task, const void* context, int64_t count, int64_t piece, int num_shares) {
    const uint64_t number = (shares_[0].ticket.load(std::memory_order_relaxed) >> 32) + 1;
    for (Share& share : shares_) share.ticket.store(number << 32 | kClosed);
    task_.store(task, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    count_.store(count, std::memory_order_relaxed);
    piece_.store(piece, std::memory_order_relaxed);
    num_done_.store(0, std::memory_order_relaxed);
    for (int i = 0; i < num_threads(); i++) {
      shares_[(size_t)i].end.store(share_begin(i + 1, num_shares, count, piece), std::memory_order_relaxed);
      shares_[(size_t)i].ticket.store(number << 32 | (uint64_t)share_begin(i, num_shares, count, piece));
    }
    opened_.advance();
  }

  void stop() {
    stopping_ = true;
    opened_.advance();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

  // Do a share of the work that was opened last when `opened_` was `seen`, then help with the others.
  void take_pieces(int thread, uint32_t seen) {
    const size_t num_shares = shares_.size(), own = (size_t)thread;
    const uint64_t started = __rdtsc();
    take_share(shares_[own], thread);
    const uint64_t ended = __rdtsc(), patience = std::min((ended - started) / 2, kMaxPatience);
    // To look at the others' tickets would take these away from them.
    const auto is_done = [&] {
      return num_done_.load(std::memory_order_acquire) == count_.load(std::memory_order_relaxed);
    };
    while (!is_done() && opened_.read() == seen && __rdtsc() - ended < patience) _mm_pause();
    for (size_t i = 1; i < num_shares && !is_done(); i++) take_share(shares_[(own + i) % num_shares], thread);
  }

  void take_share(Share& share, int thread) {
    int64_t num_done = 0, count = 0;
    while (true) {
      uint64_t ticket = share.ticket.load(std::memory_order_acquire);
      const int64_t first = (int64_t)(ticket & kClosed), end = share.end.load(std::memory_order_relaxed);
      if (first >= end) break;
      const Task task = task_.load(std::memory_order_relaxed);
      const void* context = context_.load(std::memory_order_relaxed);
      const int64_t last = std::min(first + piece_.load(std::memory_order_relaxed), end);
      if (!share.ticket.compare_exchange_strong(ticket, (ticket & ~kClosed) | (uint64_t)last)) continue;
      task(context, first, last, thread);
      num_done += last - first;
      count = count_.load(std::memory_order_relaxed);
    }
    if (num_done == 0) return;
    if (num_done_.fetch_add(num_done, std::memory_order_acq_rel) + num_done == count) finished_.advance();
  }

  void serve(int thread) {
    FlushDenormals flush;
    while (!stopping_) {
      const uint32_t seen = opened_.read();
      cores_.keep_apart(thread);
      take_pieces(thread, seen);
      if (!stopping_) opened_.wait_for_change(seen, kSpins);
    }
  }

  Cores cores_;
  std::vector<std::thread> threads_;
  std::atomic<bool> stopping_{false};
  Signal opened_, finished_;
  std::vector<Share> shares_;
  std::atomic<Task> task_{nullptr};
  std::atomic<const void*> context_{nullptr};
  std::atomic<int64_t> count_{0}, piece_{1};
  alignas(64) std::atomic<int64_t> num_done_{0};
};

}  // namespace pageglass
