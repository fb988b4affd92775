"""The threads of a native step: every item of work is done once, whoever comes late."""

import subprocess
from pathlib import Path

import pytest

from engine.kernels.cpu.build import SOURCE_FOLDER
from engine.kernels.cpu.instruction_sets import runnable

pytestmark = pytest.mark.skipif(not runnable(), reason="this CPU runs none of the native kernels")

PROGRAM = r"""
#include <cstdio>
#include <random>

#include "thread_pool.h"

using namespace pageglass;

// Who is stuck in an item is no reason for others to wait: with two threads in two items that end last, the
// third one does all the rest.
void check_help() {
  constexpr int kItems = 60;
  ThreadPool pool(3);
  for (bool is_in_order : {false, true}) {
    std::atomic<int> num_done{0};
    const auto body = [&](int64_t first, int64_t, int) {
      const bool is_last = first == pool.share_begin(1, kItems, 1) || first == pool.share_begin(2, kItems, 1);
      while (is_last && num_done < kItems - 2) std::this_thread::yield();
      num_done++;
    };
    if (is_in_order) pool.parallel_in_order(kItems, 1, body);
    else pool.parallel(kItems, 1, body);
  }
}

// The first piece that each thread takes, none of which ends before all threads have one.
void check_shares() {
  constexpr int kThreads = 3, kItems = 60;
  ThreadPool pool(kThreads);
  for (bool is_in_order : {false, true}) {
    std::atomic<int> num_begun{0};
    std::vector<int64_t> begun((size_t)kThreads, -1);
    const auto body = [&](int64_t first, int64_t, int thread) {
      if (begun[(size_t)thread] >= 0) return;
      begun[(size_t)thread] = first;
      num_begun++;
      while (num_begun < kThreads) std::this_thread::yield();
    };
    if (is_in_order) pool.parallel_in_order(kItems, 1, body);
    else pool.parallel(kItems, 1, body);
    if (is_in_order) std::sort(begun.begin(), begun.end());
    for (int thread = 0; thread < kThreads; thread++) {
      const int64_t expected = is_in_order ? thread : pool.share_begin(thread, kItems, 1);
      if (begun[(size_t)thread] != expected) std::puts("not its own share");
    }
  }
}

int main() {
  check_help();
  check_shares();
  std::mt19937 random(1);
  const auto below = [&](int end) { return (int)(random() % (unsigned)end); };
  for (int num_threads : {1, 2, 3, 7}) {
    ThreadPool pool(num_threads);
    std::vector<int> num_done(600), is_busy((size_t)num_threads);
    for (int work = 0; work < 3000; work++) {
      const int64_t count = below(work % 10 == 0 ? 600 : 40), piece = 1 + below(9), slow = below(600);
      const bool is_in_order = below(2) == 0;
      std::fill(num_done.begin(), num_done.end(), 0);
      const auto body = [&](int64_t first, int64_t last, int thread) {
        if (is_busy[(size_t)thread]++ != 0) std::puts("two had the same number");
        const int64_t most = num_threads == 1 ? count : piece;
        if (first >= last || last - first > most) std::puts("no piece");
        for (int64_t i = first; i < last; i++) {
          num_done[(size_t)i]++;
          if (i == slow) std::this_thread::yield();
        }
        is_busy[(size_t)thread]--;
      };
      if (is_in_order) pool.parallel_in_order(count, piece, body);
      else pool.parallel(count, piece, body);
      for (int64_t i = 0; i < 600; i++) {
        if (num_done[(size_t)i] != (i < count)) std::puts("not done once");
      }
      for (int thread = 0; thread < num_threads; thread++) {
        const int64_t begin = pool.share_begin(thread, count, piece);
        const int64_t end = pool.share_begin(thread + 1, count, piece);
        if (begin > end || (begin < count && begin % piece != 0) || end > count) std::puts("no share");
      }
    }
  }
  std::puts("done");
}
"""


def test_every_item_is_done_once_and_seen_by_the_caller(tmp_path: Path) -> None:
    source, program = tmp_path / "pool.cpp", tmp_path / "pool"
    source.write_text(PROGRAM)
    flags = ["-std=c++17", "-O2", "-g", "-mavx2", "-mfma", "-mf16c", "-pthread", f"-I{SOURCE_FOLDER}"]
    subprocess.run(["c++", *flags, source, "-o", program], check=True)
    run = subprocess.run([program], capture_output=True, text=True, timeout=20, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "done\n", "")
