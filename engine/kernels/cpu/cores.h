// Which core each thread of a step is on, so that no two of them share one while others are idle.
//
// The kernel places a thread that wakes up near the one that woke it, and moves it away only when it balances its
// cores. On a small virtual machine that was seen to take seconds, in which two threads took turns on one of two
// cores: a first token took 113 ms in place of 53. Threads are not bound to cores for that, since whoever else needs
// a core would then find it taken: a thread that finds itself on the core of another asks to be put elsewhere, once.

#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

namespace pageglass {

class Cores {
 public:
  explicit Cores(int num_threads) : cores_((size_t)num_threads) {
    for (Core& core : cores_) core.number.store(-1, std::memory_order_relaxed);
  }

  // Say where thread `thread` is, which calls this.
  int note(int thread) {
    const int here = sched_getcpu();
    cores_[(size_t)thread].number.store(here, std::memory_order_relaxed);
    return here;
  }

  // The same, and move if a thread before it was last seen on the same core. A moment's peace after each move: where
  // all cores are taken, moving would not end.
  void keep_apart(int thread) {
    const int here = note(thread);
    if (here < 0 || !is_taken(here, thread)) return;
    Core& own = cores_[(size_t)thread];
    const int64_t now = std::chrono::steady_clock::now().time_since_epoch().count();
    if (now - own.moved_ns < kPeaceNs) return;
    own.moved_ns = now;
    leave(thread);
    note(thread);
  }

 private:
  struct alignas(64) Core {
    std::atomic<int> number{-1};
    int64_t moved_ns = 0;  // its own thread's
  };
  static constexpr int64_t kPeaceNs = 2000000;

  bool is_taken(int core, int thread) const {
    for (int other = 0; other < thread; other++) {
      if (cores_[(size_t)other].number.load(std::memory_order_relaxed) == core) return true;
    }
    return false;
  }

  // Allow the thread only cores where no other is, for as long as it takes the kernel to move it.
  void leave(int thread) const {
    cpu_set_t allowed, wanted;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
    wanted = allowed;
    for (size_t other = 0; other < cores_.size(); other++) {
      const int core = cores_[other].number.load(std::memory_order_relaxed);
      if (core >= 0 && (int)other != thread) CPU_CLR((size_t)core, &wanted);
    }
    CPU_CLR((size_t)cores_[(size_t)thread].number.load(std::memory_order_relaxed), &wanted);
    if (CPU_COUNT(&wanted) == 0) return;
    if (sched_setaffinity(0, sizeof wanted, &wanted) == 0) sched_setaffinity(0, sizeof allowed, &allowed);
  }

  std::vector<Core> cores_;
};

}  // namespace pageglass
