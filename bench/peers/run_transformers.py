"""Drives transformers' `generate`. Settings: `model` (folder), `batch` (sequences at once)."""

import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from bench.common import Figures
from bench.peers.driver import Job, Settings, serve
from bench.timing import Answer, figures_of, throughput
from bench.workload import Prompt, shared_prefix

_PADDING_ID = 2


class _Clock:
    """A streamer that notes when tokens come; the first call brings the prompt."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def put(self, _tokens: Tensor) -> None:
        self.times_s.append(time.perf_counter())

    def end(self) -> None:
        pass


class Transformers:
    """A `Driver` of one model."""

    def __init__(self, settings: Settings) -> None:
        """Load the model."""
        torch.set_num_threads(settings["threads"])
        self._batch: int = settings["batch"]
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            settings["model"], dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
        self._model.generation_config.eos_token_id = None
        self.description = f"transformers {transformers.__version__} generate, batches of {self._batch}"
        self._generate([Prompt(list(range(1000, 1064)), 8)] * 4)

    def run(self, job: Job) -> Figures:
        """Run a job in batches of requests of like length; W3p computes the prefix once for a batch."""
        if job.case == "W1":
            clock = _Clock()
            started_s = time.perf_counter()
            self._generate(job.prompts, streamer=clock)
            answer = Answer(started_s, len(clock.times_s) - 1, clock.times_s[1:])
            return figures_of(job.case, job.prompts, [answer], started_s)
        started_s = time.perf_counter()
        if job.case == "W3p":
            self._generate(job.prompts, cache=self._prefill(job.prompts))
        else:
            order = sorted(job.prompts, key=lambda prompt: (prompt.num_new, len(prompt.token_ids)))
            for start in range(0, len(order), self._batch):
                self._generate(order[start : start + self._batch])
        return throughput(job.prompts, time.perf_counter() - started_s)

    def close(self) -> None:
        """Nothing to end."""

    def _prefill(self, prompts: Sequence[Prompt]) -> Any:
        """Return the cache of the common prefix, repeated for each prompt."""
        cache: Any = transformers.DynamicCache(config=self._model.config)
        prefix = torch.tensor([shared_prefix(list(prompts)).token_ids])  # (1, prefix) int64
        with torch.no_grad():
            self._model(input_ids=prefix, cache=cache, use_cache=True)
        cache.batch_repeat_interleave(len(prompts))
        return cache

    def _generate(self, prompts: Sequence[Prompt], **options: Any) -> None:
        """Run prompts as one batch, as long as the longest answer."""
        num_new = max(prompt.num_new for prompt in prompts)
        width = max(len(prompt.token_ids) for prompt in prompts)
        padding = [width - len(prompt.token_ids) for prompt in prompts]
        rows = [[_PADDING_ID] * pad + prompt.token_ids for pad, prompt in zip(padding, prompts, strict=True)]
        mask = [[0] * pad + [1] * (width - pad) for pad in padding]
        config = transformers.GenerationConfig(
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            do_sample=False,
            pad_token_id=_PADDING_ID,
            use_cache=True,
        )
        output = self._model.generate(
            input_ids=torch.tensor(rows),  # (prompts, width) int64
            attention_mask=torch.tensor(mask),  # (prompts, width) int64
            generation_config=config,
            **options,
        )  # (prompts, width + num_new) int64
        if output.shape[1] != width + num_new:
            raise RuntimeError(f"{output.shape[1] - width} tokens instead of {num_new}")


if __name__ == "__main__":
    serve(Transformers)
