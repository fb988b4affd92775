"""How fast the simulator is: `python -m bench.simulator [--steps N]`.

Simulates steps of 64 sequences each, short prompts and long answers in a pool that holds them all, and prints
what it took on one core.
"""

import argparse
import time

from app.services.simulations import DEFAULT_COSTS
from bench.common import print_table
from engine.config import EngineConfig
from engine.simulate.pace import ReckonedPace
from engine.simulate.simulation import Simulation
from engine.simulate.workload import SimulatedLoad, SimulatedRequest, make_tokens

BATCH = 64
_PROMPT, _ANSWER = 64, 960


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000, help="simulated steps (default: %(default)s)")
    num_steps = parser.parse_args().steps
    num_requests = BATCH * (num_steps // _ANSWER + 2)
    requests = [
        SimulatedRequest(
            request_id=str(number), arrival_ns=0, prompt=make_tokens(str(number), _PROMPT), max_tokens=_ANSWER
        )
        for number in range(num_requests)
    ]
    config = EngineConfig(
        num_blocks=BATCH * (_PROMPT + _ANSWER) // 16 + BATCH, max_num_seqs=BATCH, max_waiting=num_requests
    )
    pace = ReckonedPace(DEFAULT_COSTS)
    simulation = Simulation(config, SimulatedLoad(requests=requests), pace)
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    num_sequences = count = simulated_ns = 0
    for record in simulation.records():
        count += 1
        num_sequences += len(record.batch)
        simulated_ns += record.forward_ns
        if count == num_steps:
            break
    wall_s, cpu_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
    assert count == num_steps
    header = ["simulated steps", "sequences a step", "simulated s", "CPU s", "wall s", "CPU ms a step"]
    print_table(
        header, [[count, num_sequences / count, simulated_ns / 1e9, cpu_s, wall_s, 1e3 * cpu_s / count]]
    )


if __name__ == "__main__":
    main()
