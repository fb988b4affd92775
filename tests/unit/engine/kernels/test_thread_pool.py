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

int main() {
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
    run = subprocess.run([program], capture_output=True, text=True, timeout=120, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "done\n", "")
