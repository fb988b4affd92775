"""Where the time of a decode step of 256 sequences goes.

For each way to compute: how long a step takes, what of it the host spends in scheduling, how long the GPU has
nothing to do between two launches (events around each of them), and, where torch's profiler works, the same
kernel by kernel. Then what it costs that every step is recorded and watched: the same steps with records
dropped, folded and encoded as the server does, and with ten pages watching.
"""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from bench.device.engines import Way, make_core, make_decoder, make_device, make_runner, way_of
from bench.device.floors import is_full_decode
from bench.device.kernels import describe
from bench.device.load import BLOCK_SIZE
from bench.device.part import Clock, Findings, Options, parse
from bench.device.profile import profile
from bench.device.shapes import Maker, decoder_weights, list_shapes, make_tensors
from bench.device.timed_device import TimedDevice, idle_and_busy_ms
from bench.device.timing import wait_for
from bench.device.watching import drop, watched
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.model.decoder import Decoder
from engine.records import StepRecord
from engine.runner.cuda_runner import CudaRunner
from engine.sampling_params import SamplingParams
from engine.sequence import EngineRequest

RECORDING: dict[str, int | None] = {"dropped": None, "recorded": 0, "ten pages": 10}
"""Pages that watch; None: records are thrown away."""

_SHARE_OF_WAYS = 0.6
_ROUNDS = 5


class Steps:
    """How many sequences decode, behind how long a prompt, for how many steps."""

    def __init__(self, *, is_tiny: bool) -> None:
        """Take the full size or next to nothing."""
        self.num_seqs, self.prompt, self.timed = (4, 8, 6) if is_tiny else (256, 512, 60)
        self.warm_ups, self.profiled, self.recorded = (2, 2, 8) if is_tiny else (8, 16, 150)

    def config(self) -> EngineConfig:
        """Return limits with which all of it fits."""
        longest = self.prompt + self.warm_ups + self.timed + self.profiled + self.recorded + 2 * BLOCK_SIZE
        longest = -(-longest // BLOCK_SIZE) * BLOCK_SIZE
        return EngineConfig(
            block_size=BLOCK_SIZE,
            num_blocks=self.num_seqs * (longest // BLOCK_SIZE) + self.num_seqs,
            max_num_seqs=self.num_seqs,
            max_num_batched_tokens=max(64, 32 * self.num_seqs),
            max_model_len=longest,
        )

    def start(self, runner: CudaRunner, take: Callable[[StepRecord], None]) -> EngineCore:
        """Return an engine all of whose sequences have begun to decode."""
        core = make_core(self.config(), runner)
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        for number in range(self.num_seqs):
            prompt = [(number * 31 + position * 7) % 300 for position in range(self.prompt)]
            core.add_request(
                EngineRequest(request_id=str(number), prompt_token_ids=prompt, sampling_params=params)
            )
        record = core.step().record
        take(record)
        while not is_full_decode(record, self.num_seqs):
            record = core.step().record
            take(record)
        return core


def step_s(
    core: EngineCore, count: int, take: Callable[[StepRecord], None]
) -> tuple[list[float], list[StepRecord]]:
    """Return how long each of the next steps took, and their records."""
    times_s, records = [], []
    for _ in range(count):
        started_s = time.perf_counter()
        record = core.step().record
        take(record)
        times_s.append(time.perf_counter() - started_s)
        records.append(record)
    return times_s, records


def measure_way(decoder: Decoder, way: Way, steps: Steps, options: Options) -> dict[str, Any]:
    """Return the figures of one way to compute."""
    device = TimedDevice(make_device(options.device))
    runner = make_runner(decoder, steps.config(), way, device)
    core = steps.start(runner, drop)
    step_s(core, steps.warm_ups, drop)
    times_s, records = step_s(core, steps.timed // 2, drop)
    device.is_on = True
    timed_s, _ = step_s(core, steps.timed // 2, drop)
    device.is_on = False
    runner.reset()
    wait_for(options.device)
    idle_ms, busy_ms = idle_and_busy_ms(device.spans)
    figures: dict[str, Any] = {
        "step_ms": 1e3 * statistics.median(times_s),
        "step_with_events_ms": 1e3 * statistics.median(timed_s),
        "schedule_ms": statistics.median(record.schedule_ns for record in records) / 1e6,
        "other_host_ms": statistics.median(record.host_ns for record in records) / 1e6,
        "idle_ms": idle_ms / len(timed_s),
        "idle_percent": 100 * idle_ms / (idle_ms + busy_ms),
        "launches": len(device.spans) / len(timed_s),
    }
    if options.is_cuda:
        figures["profile"] = _try_profile(core, steps.profiled)
    return figures


def _try_profile(core: EngineCore, count: int) -> dict[str, Any]:
    try:
        return profile(partial(step_s, core, count, drop), count)
    except Exception as error:  # noqa: BLE001 - not every machine lets it, and the rest does without
        return {"error": describe(error)}


def measure_recording(runner: CudaRunner, steps: Steps, clock: Clock) -> dict[str, Any]:
    """Return the median milliseconds of a step in each way to treat records, in turn, and what each costs."""
    config = steps.config()
    medians_ms: dict[str, list[float]] = {name: [] for name in RECORDING}
    while clock.left_s > 0 and len(medians_ms["dropped"]) < _ROUNDS:
        for name, num_pages in RECORDING.items():
            with watched(config, num_pages) as take:
                core = steps.start(runner, take)
                times_s, _ = step_s(core, steps.recorded, take)
            medians_ms[name].append(1e3 * statistics.fmean(times_s))
    if not medians_ms["dropped"]:
        return {"error": "no time was left"}
    base_ms = statistics.median(medians_ms["dropped"])
    costs = {
        name: 100 * (statistics.median(times_ms) / base_ms - 1)
        for name, times_ms in medians_ms.items()
        if name != "dropped" and times_ms
    }
    return {"step_ms": medians_ms, "cost_percent": costs}


def main() -> None:
    """Measure the ways, then the recording."""
    options = parse(__doc__)
    clock, findings = Clock(options.limit_s), Findings(options.json)
    steps, way = Steps(is_tiny=options.is_tiny), way_of(is_tiny=options.is_tiny)
    name, config = next(iter(list_shapes(is_tiny=options.is_tiny).items()))
    findings.put("model", name)
    findings.put("num_seqs", steps.num_seqs)
    findings.put("prompt_tokens", steps.prompt)
    dtype = torch.bfloat16 if options.is_cuda else torch.float32
    with torch.inference_mode():
        weights = decoder_weights(config, make_tensors(config, Maker(torch.device(options.device), dtype)))
        decoder = make_decoder(config, weights, steps.config().max_model_len, way.attention)
    ways = {
        "run-ahead": way,
        "no run-ahead": replace(way, computes_ahead=False),
        "no graphs": replace(way, captures_graphs=False),
    }
    for way_name, each in ways.items():
        if clock.left_s > (1 - _SHARE_OF_WAYS) * options.limit_s:
            findings.put(way_name, measure_way(decoder, each, steps, options))
            print(way_name, findings.values[way_name])
            gc.collect()
            if options.is_cuda:
                torch.cuda.empty_cache()
    runner = make_runner(decoder, steps.config(), way, make_device(options.device))
    findings.put("recording", measure_recording(runner, steps, clock))
    print("recording", findings.values["recording"])


if __name__ == "__main__":
    main()
