"""The same requests on the same weights through the continuous batching of transformers.

It takes FlashAttention where that package is installed; else `sdpa` over pages, which masks the keys of all
other sequences of the batch. So fewer sequences at once can be quicker for it, and CUDA graphs slower, since
they pad: a few settings are tried shortly, and the quickest one gets the rest of the time. A run that is cut
short is counted by the tokens that it has generated; its best seconds are given beside the mean.
"""

import gc
import os
import time
from bisect import bisect_left
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from bench.device.load import Load, load_of, shortened
from bench.device.part import Clock, Findings, Options, parse
from bench.device.shapes import Maker, list_shapes, make_tensors, transformers_model
from bench.device.timing import wait_for
from bench.workload import Prompt
from engine.model.config import ModelConfig

_ATTENTION = "sdpa"
_PROBE_SHARE = 0.45
_STOP_S = 20.0
_WINDOW_S = 5.0


@dataclass(frozen=True)
class Setting:
    """What is tried: sequences at once, CUDA graphs or not."""

    num_seqs: int
    uses_graphs: bool


@dataclass
class PeerRun:
    """When tokens came, in seconds from the start; `is_complete`: all requests ended within the time."""

    token_s: list[float] = field(default_factory=list)
    is_complete: bool = False

    def figures(self) -> dict[str, Any]:
        """Return tokens per second of the whole run, and of its best seconds."""
        if not self.token_s:
            return {
                "output_tokens": 0,
                "output_tok_s": 0.0,
                "best_tok_s": 0.0,
                "is_complete": self.is_complete,
            }
        seconds = self.token_s[-1]
        return {
            "output_tokens": len(self.token_s),
            "seconds": seconds,
            "output_tok_s": len(self.token_s) / seconds,
            "best_tok_s": best_rate(self.token_s, min(_WINDOW_S, seconds)),
            "is_complete": self.is_complete,
        }


def best_rate(times_s: list[float], window_s: float) -> float:
    """Return the most events per second in any stretch of `window_s` seconds that lies within the times."""
    if window_s <= 0:
        return 0.0
    most = 0
    for index, start_s in enumerate(times_s):
        end = bisect_left(times_s, start_s + window_s)
        most = max(most, end - index)
        if end == len(times_s):
            break
    return most / window_s


def settings_of(load: Load, *, is_cuda: bool) -> list[Setting]:
    """Return what is tried."""
    some = max(1, load.num_requests // 4)
    settings = [Setting(load.num_requests, uses_graphs=False), Setting(some, uses_graphs=False)]
    return [*settings, Setting(some, uses_graphs=True)] if is_cuda else settings


class Peer:
    """One model of transformers and the requests for it."""

    def __init__(self, options: Options, config: ModelConfig) -> None:
        """Make the model: the weights that the engine is measured with."""
        import transformers  # noqa: PLC0415 - what is above can be used without it

        self._transformers = transformers
        self._device = options.device
        self.load = load_of(is_tiny=options.is_tiny)
        self.prompts = self.load.prompts(config.vocab_size)
        dtype = torch.bfloat16 if options.is_cuda else torch.float32
        with torch.no_grad():
            tensors = make_tensors(config, Maker(torch.device(options.device), dtype))
            self._model = transformers_model(config, tensors, _ATTENTION)
        self._block_size = 16 if options.is_tiny else 256
        self.attention = ""
        """How it computes attention, once something has run."""

    def run(self, setting: Setting, prompts: list[Prompt], clock: Clock) -> PeerRun:
        """Run requests until they end or the time does."""
        manager = self._make_manager(setting, prompts)
        for number, prompt in enumerate(prompts):
            manager.add_request(
                prompt.token_ids,
                request_id=str(number),
                max_new_tokens=prompt.num_new,
                record_timestamps=True,
                eos_token_id=-1,
            )
        wait_for(self._device)
        started_s = time.perf_counter()
        manager.start()
        run, num_ended = PeerRun(), 0
        while num_ended < len(prompts) and clock.left_s > 0 and manager.is_running():
            num_ended += self._take(manager, run, started_s, timeout_s=0.2)
        if (fault := manager.background_thread_status.fatal_error) is not None:
            raise RuntimeError(f"transformers gave up: {fault}") from fault
        run.is_complete = num_ended == len(prompts)
        # What has not ended is failed by a hard stop, and given out with the tokens that it has.
        manager.stop(block=True, timeout=_STOP_S, hard_stop=True)
        if manager.is_running():
            raise TimeoutError(f"transformers did not stop within {_STOP_S:.0f} s")
        while self._take(manager, run, started_s, timeout_s=0.0):
            pass
        manager.destroy()
        run.token_s.sort()
        gc.collect()
        if self._device != "cpu":
            torch.cuda.empty_cache()
        return run

    def _take(self, manager: Any, run: PeerRun, started_s: float, *, timeout_s: float) -> int:
        """Count the tokens of the next request that has ended; return whether there was one."""
        output = manager.get_result(timeout=timeout_s)
        if output is None:
            return 0
        run.token_s += [token_s - started_s for token_s in output.timestamps or []]
        return 1

    def _make_manager(self, setting: Setting, prompts: list[Prompt]) -> Any:
        pages = [-(-(len(p.token_ids) + p.num_new) // self._block_size) + 1 for p in prompts]
        limits = self._transformers.ContinuousBatchingConfig(
            block_size=self._block_size,
            num_blocks=sum(sorted(pages)[-setting.num_seqs :]) + 8,
            max_batch_tokens=max(256, self.load.max_num_batched_tokens // 4),  # the mask has a row for each
            max_requests_per_batch=setting.num_seqs,
            allow_block_sharing=False,  # no two prompts begin alike
            use_cuda_graph=setting.uses_graphs,
            seed=0,
        )
        generation = self._transformers.GenerationConfig(
            do_sample=False, eos_token_id=-1, max_new_tokens=1024
        )
        manager = self._model.init_continuous_batching(
            generation_config=generation, continuous_batching_config=limits
        )
        manager.warmup()  # allocates all there is to allocate, captures graphs if there shall be any
        self.attention = self._model.config._attn_implementation  # noqa: SLF001 - it says so nowhere else
        return manager


def measure(options: Options, config: ModelConfig, clock: Clock) -> dict[str, Any]:
    """Try the settings, then run all requests with the quickest one."""
    peer = Peer(options, config)
    settings = settings_of(peer.load, is_cuda=options.is_cuda)
    peer.run(settings[-1], shortened(peer.prompts[:2], 2), clock)
    probe_s = _PROBE_SHARE * clock.left_s / len(settings)
    probes = [try_run(peer, setting, Clock(min(probe_s, clock.left_s))) for setting in settings]
    best = max(range(len(settings)), key=lambda index: float(probes[index]["best_tok_s"]))
    return {
        "attention": peer.attention,
        "num_requests": len(peer.prompts),
        "probes": probes,
        **try_run(peer, settings[best], clock),
    }


def try_run(peer: Peer, setting: Setting, clock: Clock) -> dict[str, Any]:
    """Return the figures of all requests with a setting; of one that it cannot do, why not."""
    try:
        figures = peer.run(setting, peer.prompts, clock).figures()
    except (RuntimeError, MemoryError, ValueError) as error:
        figures = {"output_tok_s": 0.0, "best_tok_s": 0.0, "error": f"{type(error).__name__}: {error}"}
    return {**asdict(setting), **figures}


def main() -> None:
    """Measure each shape in its share of the time."""
    options = parse(__doc__)
    clock, findings = Clock(options.limit_s), Findings(options.json)
    shapes = list_shapes(is_tiny=options.is_tiny)
    for number, (name, config) in enumerate(shapes.items()):
        figures = measure(options, config, Clock(clock.left_s / (len(shapes) - number)))
        findings.put(name, figures)
        print(f"{name}: {figures}", flush=True)
        gc.collect()
    os._exit(0)  # whatever thread of it may be left


if __name__ == "__main__":
    main()
