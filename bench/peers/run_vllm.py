"""Drives vLLM in the process. Settings: `model` (folder)."""

import importlib
import time
from collections.abc import Sequence
from typing import Any

from bench.common import Figures
from bench.peers.driver import Job, Settings, serve
from bench.timing import throughput
from bench.workload import Prompt, shared_prefix

_LOWEST_ID = 100
"""Below lie special tokens."""


class Vllm:
    """A `Driver` of vLLM; its prefix cache is on and emptied before each run."""

    def __init__(self, settings: Settings) -> None:
        """Load the model."""
        self._vllm: Any = importlib.import_module("vllm")
        self._engine = self._vllm.LLM(
            model=settings["model"],
            dtype="bfloat16",
            max_model_len=1024,
            max_num_seqs=64,
            enable_prefix_caching=True,
            disable_log_stats=True,
        )
        self.description = f"vLLM {self._vllm.__version__}, {settings['model']}"
        self._generate([Prompt(list(range(1000 + i, 1400 + i)), 32) for i in range(64)])

    def run(self, job: Job) -> Figures:
        """Run a job: all requests at once."""
        self._engine.reset_prefix_cache()
        if job.case == "W1":
            return self._run_alone(job.prompts[0])
        prompts = job.prompts
        if job.case == "W3n":
            prompts = [_unshared(prompt, number) for number, prompt in enumerate(prompts)]
        if job.case == "W3w":
            self._generate([shared_prefix(prompts)])
        return throughput(prompts, self._generate(prompts))

    def close(self) -> None:
        """Nothing to end."""

    def _run_alone(self, prompt: Prompt) -> Figures:
        """Measure the first token and all of them; the difference is decoding."""
        first_s = self._generate([Prompt(prompt.token_ids, 1)])
        self._engine.reset_prefix_cache()
        all_s = self._generate([prompt])
        return {"first_token_ms": first_s * 1e3, "decode_tok_s": (prompt.num_new - 1) / (all_s - first_s)}

    def _generate(self, prompts: Sequence[Prompt]) -> float:
        """Return how many seconds all requests took."""
        inputs = [{"prompt_token_ids": prompt.token_ids} for prompt in prompts]
        params = [
            self._vllm.SamplingParams(temperature=0, max_tokens=prompt.num_new, ignore_eos=True)
            for prompt in prompts
        ]
        started_s = time.perf_counter()
        outputs = self._engine.generate(inputs, params, use_tqdm=False)
        seconds = time.perf_counter() - started_s
        for prompt, output in zip(prompts, outputs, strict=True):
            if len(output.outputs[0].token_ids) != prompt.num_new:
                raise RuntimeError(f"{len(output.outputs[0].token_ids)} tokens instead of {prompt.num_new}")
        return seconds


def _unshared(prompt: Prompt, number: int) -> Prompt:
    """Return the prompt with another first token, so that it shares no block with others."""
    return Prompt([_LOWEST_ID + number, *prompt.token_ids[1:]], prompt.num_new)


if __name__ == "__main__":
    serve(Vllm)
