"""A random run, recorded: JavaScript shows at every step, in any order, what the fold says."""

import json
import random
from pathlib import Path
from typing import Any

from app.history.record_codec import encode_plain, encode_state
from app.services.session_replay import Passage, copy, make_frames
from engine.records import StepRecord
from engine.snapshot import EngineSnapshot
from tests.builders import random_run
from tests.support.node import run_node
from tests.support.wire import packed_cells

CHUNK_STEPS = 256
NUM_STEPS = 1500
NUM_SEEKS = 40


class Run:
    """Records of a random run, and the state after each of them."""

    def __init__(self, seed: int, **overrides: Any) -> None:
        self.records: list[StepRecord] = []
        self.states: list[EngineSnapshot] = []
        snapshot = None
        for core, result in random_run(seed, NUM_STEPS, **overrides):
            if snapshot is None:
                snapshot = EngineSnapshot(core.config)
                self.states.append(copy(snapshot))
            snapshot.apply(result.record)
            self.records.append(result.record)
            self.states.append(copy(snapshot))
        totals = self.states[-1].totals
        assert totals.num_preemptions > 0
        assert totals.num_evictions > 0
        assert totals.num_hit_tokens > 0

    def write_chunks(self, folder: Path, gap: tuple[int, int] | None = None) -> None:
        """Write every chunk as the server would; `gap`: first and last step that were lost."""
        first_lost, last_lost = gap or (0, 0)
        for first in range(1, NUM_STEPS + 1, CHUNK_STEPS):
            last = min(first + CHUNK_STEPS - 1, NUM_STEPS)
            begins_in_gap = first_lost < first <= last_lost
            if begins_in_gap and last < last_lost:
                continue  # nothing of it is recorded
            kept = [
                record
                for record in self.records[first - 1 : last]
                if not first_lost <= record.step <= last_lost
            ]
            has_base = gap is not None and first <= last_lost <= last and not begins_in_gap
            passage = Passage(
                session="s1",
                model="fake",
                config=self.states[0].config,
                first_step=first,
                start=copy(self.states[last_lost if begins_in_gap else first - 1]),
                chunks=[encode_plain(kept)],
                bases={last_lost: encode_state(self.states[last_lost].export_state())} if has_base else {},
                gaps={last_lost: (first_lost, last_lost - first_lost + 1)} if gap else {},
            )
            (folder / f"chunk-{first}.bin").write_bytes(make_frames(passage, last))

    def check(self, seen: dict[str, Any]) -> None:
        """Compare what JavaScript shows with the state after the same step."""
        assert seen["problem"] == ""
        state = self.states[seen["step"]]
        assert seen["cells"] == packed_cells(state.to_dict()["blocks"])
        counts = state.host_counts
        if counts["total"]:
            num_loading = sum(view.is_loading for view in state.running)
            assert seen["host"] == {**counts, "loading": num_loading}
        else:
            assert seen["host"] is None
        assert seen["batch"]["step"] == (state.last_batch.step if state.last_batch else 0)
        entries = state.last_batch.batch if state.last_batch else []
        assert [entry["seqId"] for entry in seen["batch"]["entries"]] == [entry.seq_id for entry in entries]


def replay(folder: Path, seeks: list[tuple[int, int]], gaps: list[dict[str, int]]) -> list[dict[str, Any]]:
    span = {"firstStep": 1, "lastStep": NUM_STEPS, "isRunning": False, "gaps": gaps}
    (folder / "plan.json").write_text(json.dumps({"session": "s1", "range": span, "seeks": seeks}))
    return [json.loads(line) for line in run_node("replay_seeks.mjs", folder).splitlines()]


def random_seeks(seed: int) -> list[tuple[int, int]]:
    rng = random.Random(seed)
    seeks = [(rng.randrange(1, NUM_STEPS + 1), rng.choice((-1, 1))) for _ in range(NUM_SEEKS)]
    near = [(step + rng.randrange(-3, 4), 1) for step, _ in seeks[:10]]
    return [*seeks, *near, (1, 1), (256, 1), (257, 1), (256, -1), (NUM_STEPS, 1)]


def test_after_any_seek_the_picture_is_the_recorded_state(tmp_path: Path) -> None:
    run = Run(11)
    run.write_chunks(tmp_path)
    seeks = random_seeks(1)
    for (step, _), seen in zip(seeks, replay(tmp_path, seeks, []), strict=True):
        wanted = min(NUM_STEPS, max(1, step))
        assert seen["step"] == seen["wanted"] == wanted
        run.check(seen)
        rows = seen["rows"]
        assert rows == list(range(rows[0], wanted + 1))
        chunk = (wanted - 1) // CHUNK_STEPS * CHUNK_STEPS + 1
        assert rows[0] <= max(1, chunk - 3 * CHUNK_STEPS)


def test_over_a_gap_every_picture_is_still_a_recorded_state(tmp_path: Path) -> None:
    run = Run(12, policy="priority", num_host_blocks=40, load_steps=3, policy_rate=0.02)
    totals = run.states[-1].totals
    assert totals.num_swaps > 0
    assert totals.num_loads > 0
    for first_lost, last_lost in ((300, 310), (500, 530), (500, 1030)):
        run.write_chunks(tmp_path, (first_lost, last_lost))
        gaps = [{"first_step": first_lost, "num_steps": last_lost - first_lost + 1}]
        seeks = [
            *random_seeks(2),
            (first_lost, 1),
            (first_lost, -1),
            (last_lost, 1),
            (last_lost + 1, 1),
            (first_lost - 1, 1),
        ]
        for (step, direction), seen in zip(seeks, replay(tmp_path, seeks, gaps), strict=True):
            wanted = min(NUM_STEPS, max(1, step))
            if first_lost <= wanted < last_lost:
                wanted = last_lost if direction > 0 else first_lost - 1
            assert (seen["problem"], seen["step"]) == ("", wanted)
            run.check(seen)
            assert not set(seen["rows"]) & set(range(first_lost, last_lost + 1))
