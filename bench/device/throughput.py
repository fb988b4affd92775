"""Tokens per second of the engine on models of real shapes, against the roofline.

256 requests at once with prompts and answers of 100 to 1,024 tokens, through scheduler, run-ahead and CUDA
graphs, as `pageglass serve` runs them but without the HTTP server. Then the same prompts with one token each:
the speed of prefill. What the time does not suffice for is left out and said so.
"""

import gc
import json
import statistics
from typing import Any

import torch

from bench.costs import ModelCosts
from bench.device.ceilings import Ceilings, ceilings_of
from bench.device.engines import Run, drive, make_core, make_decoder, make_device, make_runner, way_of
from bench.device.floors import costs_of, floors_s, is_full_decode
from bench.device.load import engine_config, load_of, shortened, sweep
from bench.device.part import Clock, Findings, Options, parse
from bench.device.shapes import Maker, decoder_weights, list_shapes, make_tensors
from bench.device.timing import wait_for
from engine.model.config import ModelConfig

_WARM_UP_SHARE = 0.5
_WARM_UP_TOKENS = 4


def measure(options: Options, config: ModelConfig, ceilings: Ceilings, clock: Clock) -> dict[str, Any]:
    """Return the figures of one shape."""
    load = load_of(is_tiny=options.is_tiny)
    prompts = load.prompts(config.vocab_size)
    limits = engine_config(load, prompts)
    dtype = torch.bfloat16 if options.is_cuda else torch.float32
    way = way_of(is_tiny=options.is_tiny)
    with torch.inference_mode():
        weights = decoder_weights(config, make_tensors(config, Maker(torch.device(options.device), dtype)))
        decoder = make_decoder(config, weights, limits.max_model_len, way.attention)
    runner = make_runner(decoder, limits, way, make_device(options.device))
    warm_up = Clock(_WARM_UP_SHARE * clock.left_s)
    warmed = [
        drive(make_core(limits, runner), sweep(load.num_requests), warm_up),
        drive(make_core(limits, runner), shortened(prompts, _WARM_UP_TOKENS), warm_up),
    ]
    costs = costs_of(config)
    prefill = drive(make_core(limits, runner), shortened(prompts, 1), clock)
    num_taken, num_dropped = runner.num_taken, runner.num_dropped
    run = drive(make_core(limits, runner), prompts, clock)
    wait_for(options.device)
    return {
        "way": str(way),
        "num_requests": load.num_requests,
        "warm_up_s": sum(each.seconds for each in warmed),
        "is_warm": all(each.is_complete for each in warmed),
        **describe(run, costs, ceilings, load.num_requests),
        "taken_from_run_ahead": runner.num_taken - num_taken,
        "dropped_by_run_ahead": runner.num_dropped - num_dropped,
        "prefill": describe_prefill(prefill, costs, ceilings),
    }


def describe(run: Run, costs: ModelCosts, ceilings: Ceilings, num_seqs: int) -> dict[str, Any]:
    """Return the figures of a run: of all of it, and of its steps that only decoded, with a full batch."""
    if not run.records:
        return {"is_complete": False, "output_tokens": 0}
    floors = floors_s(costs, run.records, ceilings)
    full = [index for index, record in enumerate(run.records) if is_full_decode(record, num_seqs)]
    figures: dict[str, Any] = {
        "is_complete": run.is_complete,
        "num_steps": len(run.records),
        "output_tokens": run.num_tokens,
        "seconds": run.seconds,
        "output_tok_s": run.num_tokens / run.seconds,
        "roofline_percent": 100 * sum(floors) / run.seconds,
        "full_decode_steps": len(full),
    }
    if full:
        took_s = sum(run.step_s[index] for index in full)
        floor_s = sum(floors[index] for index in full)
        figures |= {
            "full_decode_ms": 1e3 * statistics.median(run.step_s[index] for index in full),
            "full_decode_floor_ms": 1e3 * statistics.median(floors[index] for index in full),
            "full_decode_roofline_percent": 100 * floor_s / took_s,
        }
    return figures


def describe_prefill(run: Run, costs: ModelCosts, ceilings: Ceilings) -> dict[str, Any]:
    """Return the figures of a run that computes prompts."""
    if not run.records:
        return {"is_complete": False, "tokens": 0}
    num_tokens = sum(entry.num_scheduled for record in run.records for entry in record.batch)
    return {
        "is_complete": run.is_complete,
        "tokens": num_tokens,
        "seconds": run.seconds,
        "tok_s": num_tokens / run.seconds,
        "roofline_percent": 100 * sum(floors_s(costs, run.records, ceilings)) / run.seconds,
    }


def main() -> None:
    """Measure each shape in its share of the time."""
    options = parse(__doc__)
    clock, findings = Clock(options.limit_s), Findings(options.json)
    ceilings = ceilings_of(options)
    shapes = list_shapes(is_tiny=options.is_tiny)
    for number, (name, config) in enumerate(shapes.items()):
        share = Clock(clock.left_s / (len(shapes) - number))
        figures = measure(options, config, ceilings, share)
        findings.put(name, figures)
        print(f"{name}: {json.dumps(figures)}")
        gc.collect()
        if options.is_cuda:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
