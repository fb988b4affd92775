"""`/api/sessions` through the whole application, over a fake engine."""

import asyncio
import json
import random
from typing import Any

from sqlalchemy import func, insert, select, update

from app.db.models import SessionRow
from app.history.recorder import RecordPart
from engine.config import EngineConfig
from engine.records import StepRecord
from engine.snapshot import EngineSnapshot
from tests.support.api import Api, running_api, until
from tests.support.fake_engine import FakeEngine
from tests.support.history import execute
from tests.support.recording import as_json
from tests.support.wire import Picture, packed_cells, split_messages

SERVER_KEYS = ("status", "session", "model", "progress", "engine")


class StateKeeper(RecordPart):
    """Keeps the state after each step as the server itself saw it."""

    def __init__(self) -> None:
        self.states: dict[int, Any] = {}

    def on_open(self, config: EngineConfig) -> None:
        pass

    def on_record(self, record: StepRecord, snapshot: EngineSnapshot) -> None:
        self.states[record.step] = as_json(snapshot)

    def on_close(self) -> None:
        pass


def make_tiny_engine() -> FakeEngine:
    """Return an engine with so few blocks that requests evict and preempt each other."""
    return FakeEngine(num_blocks=32, max_model_len=128, max_num_seqs=6)


async def make_traffic(api: Api, num_requests: int, seed: int = 1) -> None:
    rng = random.Random(seed)
    prefixes = ["the same beginning of eighteen ", "another one, no longer "]
    prompts = [rng.choice(prefixes) + "x" * rng.randrange(1, 8) for _ in range(num_requests)]
    responses = await asyncio.gather(
        *(api.complete(prompt, max_tokens=rng.randrange(8, 40), n=4, ignore_eos=True) for prompt in prompts)
    )
    assert {response.status_code for response in responses} == {200}


async def wait_recorded(api: Api) -> str:
    """Wait until all steps so far are in the file; return the id of the session."""
    hub = api.plugin.hub

    async def count() -> bool:
        assert hub.snapshot is not None
        response = await api.client.get(f"/api/sessions/{hub.session_id}")
        return response.status_code == 200 and response.json()["last_step"] == hub.snapshot.step

    async with asyncio.timeout(10):
        while not await count():
            await asyncio.sleep(0.01)
    return hub.session_id


async def test_states_after_a_restart_equal_those_seen_live_at_fifty_steps() -> None:
    keeper = StateKeeper()
    async with running_api(make_tiny_engine()) as api:
        api.plugin.recorder.add_part(keeper)
        await make_traffic(api, 24)
        first = await wait_recorded(api)
        live = await api.client.get("/api/engine/state")
        recorded = await api.client.get(f"/api/sessions/{first}/state")
        assert recorded.content == live.content
        live_small = await api.client.get("/api/engine/state?blocks=0")
        assert (await api.client.get(f"/api/sessions/{first}/state?blocks=0")).content == live_small.content
    last = max(keeper.states)
    assert min(keeper.states[last]["totals"][f"num_{key}"] for key in ("preemptions", "hit_tokens")) > 0
    assert keeper.states[last]["totals"]["num_evictions"] > 0
    async with running_api(make_tiny_engine()) as api:
        await api.plugin.writer.settle()
        items = (await api.client.get("/api/sessions")).json()["items"]
        assert [(item["id"] == first, item["status"]) for item in items] == [
            (False, "running"),
            (True, "stopped"),
        ]
        for step in random.Random(3).sample(range(1, last + 1), 50):
            state = (await api.client.get(f"/api/sessions/{first}/state?step={step}")).json()
            facts = {key: state.pop(key) for key in SERVER_KEYS}
            assert facts == {
                "status": "ready", "session": first, "model": "fake", "progress": None, "engine": None
            }  # fmt: skip
            assert state == keeper.states[step], f"step {step}"


async def test_chunks_are_the_live_picture_and_are_cached_once_they_are_whole() -> None:
    async with running_api(make_tiny_engine()) as api:
        await make_traffic(api, 24)
        sid = await wait_recorded(api)
        last = (await api.client.get(f"/api/sessions/{sid}")).json()["last_step"]
        assert last > 256
        whole = await api.client.get(f"/api/sessions/{sid}/chunks/1")
        assert whole.headers["content-type"] == "application/octet-stream"
        assert whole.headers["cache-control"] == "private, max-age=31536000, immutable"
        again = await api.client.get(
            f"/api/sessions/{sid}/chunks/1", headers={"If-None-Match": whole.headers["etag"]}
        )
        assert (again.status_code, again.content) == (304, b"")
        tag = whole.headers["etag"]
        for known in (f"W/{tag}", f'"a", W/{tag}', f'{tag},"b"', "*"):
            again = await api.client.get(f"/api/sessions/{sid}/chunks/1", headers={"If-None-Match": known})
            assert again.status_code == 304, known
        for other in ('"a"', f"{tag}x", ""):
            again = await api.client.get(f"/api/sessions/{sid}/chunks/1", headers={"If-None-Match": other})
            assert again.status_code == 200, other
        newest = await api.client.get(f"/api/sessions/{sid}/chunks/{(last - 1) // 256 * 256 + 1}")
        assert newest.headers["cache-control"] == "no-store"
        picture = Picture()
        for message in split_messages(newest.content):
            picture.apply(message)
        state = (await api.client.get(f"/api/sessions/{sid}/state")).json()
        assert (picture.step, picture.cells) == (state["step"], packed_cells(state["blocks"]))
        records = (await api.client.get(f"/api/sessions/{sid}/chunks/1?format=records")).json()["items"]
        assert [record["step"] for record in records] == list(range(1, 257))
        assert {"batch", "block_ops", "events", "stop_reason", "t_ns"} <= records[0].keys()


async def test_a_session_is_described_with_its_configuration_and_requests() -> None:
    async with running_api(make_tiny_engine()) as api:
        await make_traffic(api, 3)
        sid = await wait_recorded(api)
        session = (await api.client.get(f"/api/sessions/{sid}")).json()
        assert session["status"] == "running"
        assert session["started"].endswith("Z")
        assert session["ended"] is None
        assert session["config"]["num_blocks"] == 32
        assert session["engine"] == (await api.client.get("/api/engine/state")).json()["engine"]
        assert (session["chunk_steps"], session["gaps"], session["bookmarks"]) == (256, [], [])
        assert (session["model"], session["first_step"], session["num_lost_steps"]) == ("fake", 1, 0)
        assert session["num_requests"] == 3
        assert session["num_bytes"] > 0
        (item,) = (await api.client.get("/api/sessions")).json()["items"]
        assert item.items() <= session.items()


async def test_the_configuration_is_what_was_recorded_without_defaults_of_later_versions() -> None:
    async with running_api(make_tiny_engine()) as api:
        await make_traffic(api, 1)
        sid = await wait_recorded(api)
        known = (await api.client.get(f"/api/sessions/{sid}")).json()["config"]
        older = {key: known[key] for key in ("block_size", "num_blocks", "max_model_len", "max_num_seqs")}
        row = update(SessionRow).where(SessionRow.id == sid).values(config=json.dumps(older))
        await execute(api.plugin.database, row)
        assert (await api.client.get(f"/api/sessions/{sid}")).json()["config"] == older
        state = (await api.client.get(f"/api/sessions/{sid}/state?step=3")).json()
        assert state["config"] == older
        assert (state["step"], state["counts"]["total"]) == (3, 32)


async def test_sessions_are_listed_newest_first_in_pages() -> None:
    async with running_api() as api:
        await api.plugin.writer.settle()
        for number in range(5):
            row = {"id": f"old{number}", "started_ns": number // 2, "ended_ns": 9, "ended_how": "stopped"}
            row |= {"model_name": "m", "version": "0", "records_text": True}
            await execute(api.plugin.database, insert(SessionRow).values(**row))
        seen: list[str] = []
        cursor: str | None = ""
        while cursor is not None:
            query = f"?limit=2&before={cursor}" if cursor else "?limit=2"
            page = (await api.client.get(f"/api/sessions{query}")).json()
            assert len(page["items"]) <= 2
            seen += [item["id"] for item in page["items"]]
            cursor = page["next"]
        assert seen == [api.plugin.hub.session_id, "old4", "old3", "old2", "old1", "old0"]


async def test_preemptions_and_ends_of_requests_are_markers() -> None:
    async with running_api(make_tiny_engine()) as api:
        await make_traffic(api, 10)
        sid = await wait_recorded(api)
        await api.client.post(f"/api/sessions/{sid}/bookmarks", json={"step": 5, "note": "look here"})
        await api.plugin.writer.settle()
        totals = (await api.client.get("/api/engine/state?blocks=0")).json()["totals"]
        answer = (await api.client.get(f"/api/sessions/{sid}/markers")).json()
        markers = answer["items"]
        assert not answer["truncated"]
        assert [marker["step"] for marker in markers] == sorted(marker["step"] for marker in markers)
        kinds = [marker["kind"] for marker in markers]
        assert (kinds.count("preempt"), kinds.count("finish")) == (totals["num_preemptions"], 40)
        assert {"step": 5, "kind": "bookmark", "request_id": None, "note": "look here"} in markers
        later = (await api.client.get(f"/api/sessions/{sid}/markers?after=5")).json()["items"]
        assert later == [marker for marker in markers if marker["step"] > 5]


async def test_notes_stars_and_bookmarks_are_kept() -> None:
    async with running_api() as api:
        await api.complete()
        sid = await wait_recorded(api)
        changed = await api.client.patch(f"/api/sessions/{sid}", json={"note": "<b>mine", "is_starred": True})
        assert (changed.json()["note"], changed.json()["is_starred"]) == ("<b>mine", True)
        changed = await api.client.patch(f"/api/sessions/{sid}", json={"is_starred": False})
        assert (changed.json()["note"], changed.json()["is_starred"]) == ("<b>mine", False)
        made = await api.client.post(f"/api/sessions/{sid}/bookmarks", json={"step": 2, "note": "here"})
        assert made.status_code == 201
        bookmark = made.json()
        assert (await api.client.get(f"/api/sessions/{sid}")).json()["bookmarks"] == [bookmark]
        gone = await api.client.delete(f"/api/sessions/{sid}/bookmarks/{bookmark['id']}")
        assert gone.status_code == 204
        assert (await api.client.get(f"/api/sessions/{sid}")).json()["bookmarks"] == []
        gone = await api.client.delete(f"/api/sessions/{sid}/bookmarks/{bookmark['id']}")
        assert gone.status_code == 404


async def test_an_ended_session_can_be_deleted_and_the_running_one_cannot() -> None:
    async with running_api() as api:
        await api.complete()
        old = await wait_recorded(api)
        refused = await api.client.delete(f"/api/sessions/{old}")
        assert (refused.status_code, refused.json()["code"]) == (409, "session_running")
    async with running_api() as api:
        await api.plugin.writer.settle()
        assert (await api.client.delete(f"/api/sessions/{old}")).status_code == 204
        assert (await api.client.get(f"/api/sessions/{old}")).status_code == 404
        async with api.plugin.database.read() as db:
            for table in ("chunks", "keyframes", "requests", "request_events"):
                query = select(func.count()).select_from(SessionRow.metadata.tables[table])
                query = query.where(SessionRow.metadata.tables[table].c.session_id == old)
                assert (await db.execute(query)).scalar() == 0, table


WRONG_QUESTIONS = (
    ("nope", 404, "No session 'nope'"),
    ("nope/state", 404, "No session 'nope'"),
    ("nope/chunks/1", 404, "No session 'nope'"),
    ("nope/markers", 404, "No session 'nope'"),
    ("{sid}/state?step=999999", 404, "has steps 1 to "),
    ("{sid}/state?step=-1", 400, "step is '-1'"),
    ("{sid}/state?step=ten", 400, "step is 'ten'"),
    ("{sid}/state?step=99999999999999999999999", 400, "step is "),
    ("{sid}/state?blocks=maybe", 400, "blocks is 'maybe'"),
    ("{sid}/chunks/2", 404, "begins at 1"),
    ("{sid}/chunks/0", 404, "begins at 1"),
    ("{sid}/chunks/257", 404, "has steps 1 to "),
    ("{sid}/chunks/x", 400, "first_step is 'x'"),
    ("{sid}/chunks/1?format=xml", 400, "format is 'xml'"),
    ("?limit=0", 400, "limit is '0'"),
    ("?before=yesterday", 400, "before must be"),
    ("?before=9999999999999999999.x", 400, "before must be"),
)


async def test_a_wrong_question_is_answered_with_what_is_wrong() -> None:
    async with running_api() as api:
        await api.complete()
        sid = await wait_recorded(api)
        for path, status, words in WRONG_QUESTIONS:
            response = await api.client.get(f"/api/sessions/{path.format(sid=sid)}".replace("/?", "?"))
            assert (response.status_code, words in response.json()["detail"]) == (status, True), path


WRONG_BOOKMARKS = (
    (b"{", 400, "is not JSON"),
    (b"[]", 400, "Expected `object`"),
    (b'{"step": "x"}', 400, "$.step"),
    (b'{"step": 1, "notes": ""}', 400, "unknown field `notes`"),
    (b'{"step": 99999}', 404, "Step 99999 is not recorded: session "),
    (b'{"step": 1, "note": "%s"}' % (b"x" * 2001), 400, "note has 2001 characters"),
    (b'{"step": 1, "note": "a\\ud800"}', 400, "holds half a character: \\ud800 is one of two escapes"),
    (b'{"step": 1, "note": "\\udc00 \\ud83d"}', 400, "holds half a character: \\udc00"),
    (b'{"step": 1, "note": "a\\u0000"}', 400, "note has a NUL character"),
    (b'{"step": 1, "note": NaN}', 400, "is not JSON"),
)


async def test_a_wrong_bookmark_is_refused_by_name() -> None:
    async with running_api() as api:
        await api.complete()
        sid = await wait_recorded(api)
        for body, status, words in WRONG_BOOKMARKS:
            response = await api.client.post(f"/api/sessions/{sid}/bookmarks", content=body)
            assert response.status_code == status, body
            assert words in response.json()["detail"], response.text
        note = await api.client.patch(f"/api/sessions/{sid}", content=b'{"note": "\\ud83d\\ude00\\ud83d"}')
        assert "half a character: \\ud83d is" in note.json()["detail"]


async def test_before_the_model_is_there_a_session_has_no_states() -> None:
    engine = FakeEngine()
    engine.load_gate.clear()
    async with running_api(engine, wait_ready=False) as api:
        sid = api.plugin.hub.session_id
        await api.plugin.writer.settle()
        response = await api.client.get(f"/api/sessions/{sid}/state")
        assert (response.status_code, "the model is being loaded" in response.json()["detail"]) == (404, True)
        engine.load_gate.set()
        await until(lambda: api.plugin.host.config is not None)
        await api.plugin.writer.settle()
        assert (await api.client.get(f"/api/sessions/{sid}/state")).json()["step"] == 0
