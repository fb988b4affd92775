"""Drives OpenVINO GenAI's continuous batching in the process.

Settings: `model` (folder of the exported model), `properties` (of the device), `max_num_batched_tokens`.
"""

import importlib
import time
from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np

from bench.common import Figures
from bench.peers.driver import Job, Settings, serve
from bench.timing import Answer, figures_of
from bench.workload import Prompt, shared_prefix

openvino: Any = importlib.import_module("openvino")
genai: Any = importlib.import_module("openvino_genai")

_CACHE_GB = 3
_MAX_NUM_SEQS = 64
_LONGEST_WAIT_S = 0.002


class OpenVino:
    """A `Driver` of a pipeline."""

    def __init__(self, settings: Settings) -> None:
        """Load the model."""
        self._settings = settings
        self._numbers = count()
        self._pipeline = self._make_pipeline(caching=False)
        self.description = f"OpenVINO GenAI {genai.__version__}, {settings['model']}"

    def run(self, job: Job) -> Figures:
        """Run a job; one that wants a prefix cache gets a pipeline whose cache is empty."""
        if job.case in {"W3p", "W3w"}:
            self._pipeline = self._make_pipeline(caching=True)
        if job.case == "W3w":
            self._drive([shared_prefix(job.prompts)], [0.0])
        started_s = time.perf_counter()
        answers = self._drive(job.prompts, job.arrivals_s or [0.0] * len(job.prompts))
        return figures_of(job.case, job.prompts, answers, started_s)

    def close(self) -> None:
        """Nothing to end."""

    def _make_pipeline(self, *, caching: bool) -> Any:
        self._pipeline = None  # two caches at once would not fit
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = _CACHE_GB
        scheduler.max_num_seqs = _MAX_NUM_SEQS
        scheduler.max_num_batched_tokens = self._settings["max_num_batched_tokens"]
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = caching
        properties = {
            "INFERENCE_NUM_THREADS": self._settings["threads"],
            "NUM_STREAMS": 1,
            **self._settings["properties"],
        }
        pipeline = genai.ContinuousBatchingPipeline(self._settings["model"], scheduler, "CPU", properties)
        self._pipeline = pipeline
        self._drive([Prompt(list(range(1000, 1064)), 8) for _ in range(16)], [0.0] * 16)
        return pipeline

    def _drive(self, prompts: Sequence[Prompt], arrivals_s: Sequence[float]) -> list[Answer]:
        """Add requests when they are due, step, note when tokens come."""
        started_s = time.perf_counter()
        answers = [Answer(started_s + arrival) for arrival in arrivals_s[: len(prompts)]]
        waiting = list(zip(prompts, answers, strict=True))[::-1]
        running: list[tuple[Any, Answer]] = []
        while waiting or running:
            while waiting and waiting[-1][1].due_s <= time.perf_counter():
                prompt, answer = waiting.pop()
                running.append((self._add(prompt), answer))
            if self._pipeline.has_non_finished_requests():
                self._pipeline.step()
            elif waiting:
                time.sleep(min(_LONGEST_WAIT_S, max(0.0, waiting[-1][1].due_s - time.perf_counter())))
            running = [entry for entry in running if not _take(*entry)]
        return answers

    def _add(self, prompt: Prompt) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = prompt.num_new
        config.ignore_eos = True
        config.do_sample = False
        config.stop_token_ids = set()
        config.eos_token_id = -1
        token_ids = openvino.Tensor(np.array([prompt.token_ids], dtype=np.int64))
        return self._pipeline.add_request(next(self._numbers), token_ids, config)


def _take(handle: Any, answer: Answer) -> bool:
    """Note the new tokens of a request; return whether it has ended."""
    is_running = handle.get_status() == genai.GenerationStatus.RUNNING
    now_s = time.perf_counter()
    while handle.can_read():
        for output in handle.read().values():
            num_tokens = len(output.generated_ids)
            answer.num_new += num_tokens
            answer.pieces_s += [now_s] * num_tokens
    return not is_running


if __name__ == "__main__":
    serve(OpenVino)
