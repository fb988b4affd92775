"""The native kernels against the machine's ceilings: `python -m bench.kernels --dtype q4 --rows 1,64`.

Runs steps of two shapes for each number of rows N: `decode`, N sequences of one token each after --context
others, in scattered blocks; `prefill`, one sequence of N tokens from its beginning. A shape that does not
fit into the KV pool (--kv-memory) or the longest sequence is left out, and said so. For each phase of a step
(over all layers) prints the median time, and for those that `bench.costs` knows the operations and bytes per
second and the share of the ceiling: the larger of two times, of the bytes at the measured bandwidth of
reading, and of the operations at the measured peak of the arithmetic that is used (attention: bf16).

The machine's yardstick is measured before and after, the ceilings before and after each shape.
"""

import argparse
import random
import statistics
from dataclasses import asdict, dataclass

from bench.common import (
    Activity,
    add_quiet_option,
    print_disturbed,
    print_table,
    versions,
    wait_for_quiet,
    yardstick,
)
from bench.costs import ATTENTION, Cost, Work
from bench.native import LoadedModel, describe
from bench.own_engine import add_engine_options, engine_options
from engine.kernels.cpu.library import PHASES, Ceilings, NativeModel, StepBatch, Want

WARM_UP_STEPS = 2
_KV_BYTE = 0x3C
"""Fills the KV pool with small finite numbers: pages that were never written are not memory."""


@dataclass(frozen=True)
class Shape:
    """A step: `num_sequences` of `num_scheduled` tokens each, after `num_computed`."""

    name: str
    num_sequences: int
    num_scheduled: int
    num_computed: int

    @property
    def work(self) -> list[Work]:
        """The same for `bench.costs`."""
        return [Work(self.num_computed, self.num_scheduled, is_wanted=True)] * self.num_sequences

    def blocks_per_sequence(self, block_size: int) -> int:
        """Return the blocks that one sequence needs."""
        return -(-(self.num_computed + self.num_scheduled) // block_size)

    def fits(self, model: NativeModel) -> bool:
        """Whether the model has room for it."""
        needed = self.num_sequences * self.blocks_per_sequence(model.sizes.block_size)
        is_short = self.num_computed + self.num_scheduled <= model.sizes.num_positions
        return is_short and needed <= model.sizes.num_blocks

    def make_batch(self, model: NativeModel) -> StepBatch:
        """Return the step, with random tokens and random blocks."""
        generator = random.Random(0)
        num_blocks = self.blocks_per_sequence(model.sizes.block_size)
        blocks = generator.sample(range(model.sizes.num_blocks), self.num_sequences * num_blocks)
        batch = StepBatch()
        batch.token_ids.extend(
            generator.choices(range(model.config.vocab_size), k=self.num_sequences * self.num_scheduled)
        )
        batch.tables.extend(blocks)
        for sequence in range(self.num_sequences):
            batch.num_computed.append(self.num_computed)
            batch.num_scheduled.append(self.num_scheduled)
            batch.table_starts.append((sequence + 1) * num_blocks)
            batch.wants.append(Want.GREEDY)
            batch.temperatures.append(1.0)
            batch.top_ks.append(0)
            batch.top_ps.append(1.0)
            batch.uniforms.append(0.0)
        return batch


def make_shapes(rows: list[int], context: int) -> list[Shape]:
    """Return the shapes for these numbers of rows; a prefill of one token would be a decode."""
    decodes = [Shape(f"decode {count} x 1 at {context}", count, 1, context) for count in rows]
    return decodes + [Shape(f"prefill 1 x {count}", 1, count, 0) for count in rows if count > 1]


def _time_phases(model: NativeModel, shape: Shape, repeats: int) -> dict[str, float]:
    """Return the median time of each phase in ns."""
    batch = shape.make_batch(model)
    runs: list[dict[str, int]] = []
    for _ in range(WARM_UP_STEPS + repeats):
        before = model.phase_ns()
        model.step(batch)
        runs.append({name: ns - before[name] for name, ns in model.phase_ns().items()})
    return {name: statistics.median(run[name] for run in runs[WARM_UP_STEPS:]) for name in PHASES}


def _floor_ns(loaded: LoadedModel, part: str, cost: Cost, ceilings: Ceilings) -> float:
    peak = ceilings.bf16_gflops if part == ATTENTION else loaded.peak_gops(ceilings)
    return cost.floor_ns(gb_s=ceilings.read_gb_s, gops=peak)


def _mean(first: Ceilings, second: Ceilings) -> Ceilings:
    pairs = zip(asdict(first).values(), asdict(second).values(), strict=True)
    return Ceilings(*((a + b) / 2 for a, b in pairs))


def _print_shape(loaded: LoadedModel, shape: Shape, phases_ns: dict[str, float], ceilings: Ceilings) -> None:
    costs = loaded.costs.of_step(shape.work)
    rows: list[list[object]] = []
    total_floor_ns = 0.0
    for name, took_ns in phases_ns.items():
        cells = ["", "", ""]
        if name in costs and took_ns > 0:
            floor_ns = _floor_ns(loaded, name, costs[name], ceilings)
            total_floor_ns += floor_ns
            rates = costs[name].operations / took_ns, costs[name].num_bytes / took_ns
            cells = [f"{rates[0]:.0f}", f"{rates[1]:.1f}", f"{100 * floor_ns / took_ns:.0f}"]
        rows.append([name.replace("_", " "), took_ns / 1e6, *cells])
    total_ns = sum(phases_ns.values())
    rows.append(["step", total_ns / 1e6, "", "", f"{100 * total_floor_ns / total_ns:.0f}"])
    print()
    print_table([shape.name, "ms", "GOP/s", "GB/s", "% of the ceiling"], rows)


def main() -> None:
    """Measure and print."""
    options = _parse()
    wait_for_quiet(options.quiet_wait)
    before = yardstick(options.threads)
    loaded = LoadedModel(engine_options(options))
    loaded.model.view_kv()[:] = _KV_BYTE
    print(f"{versions()}\n{before}\n{loaded.description}")
    ceilings = loaded.measure_ceilings()
    print(describe(ceilings))
    for shape in make_shapes(options.rows, options.context):
        if not shape.fits(loaded.model):
            print(f"\n{shape.name}: left out, does not fit (--kv-memory, --context)")
            continue
        wait_for_quiet(options.quiet_wait)
        activity = Activity()
        phases_ns = _time_phases(loaded.model, shape, options.repeats)
        after = loaded.measure_ceilings()
        others = activity.others()  # whoever takes a core while ceilings are measured lowers them
        _print_shape(loaded, shape, phases_ns, _mean(ceilings, after))
        print_disturbed(shape.name, [others])
        ceilings = after
    print()
    print(describe(ceilings))
    print(yardstick(options.threads))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--rows", type=_parse_rows, default=[1, 8, 64, 512], help="numbers of rows (default: 1,8,64,512)"
    )
    parser.add_argument(
        "--context", type=int, default=400, help="tokens before those of a decode (default: %(default)s)"
    )
    parser.add_argument(
        "--repeats", type=int, default=9, help="measured steps a shape (default: %(default)s)"
    )
    add_quiet_option(parser)
    add_engine_options(parser)
    return parser.parse_args()


def _parse_rows(text: str) -> list[int]:
    rows = [int(part) for part in text.split(",")]
    if min(rows) < 1:
        raise argparse.ArgumentTypeError("a step has one row or more")
    return rows


if __name__ == "__main__":
    main()
