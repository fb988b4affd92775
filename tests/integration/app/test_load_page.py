"""The load page: start, progress, stop and results of a run on a fake engine."""

from typing import Any

import pytest
from httpx import Response

from app.services import loads as loads_module
from tests.support.api import Api, running_api, served_api, until
from tests.support.fake_engine import FakeEngine
from tests.support.history import fetch

HTML = {"accept": "text/html"}
SMALL: dict[str, str] = {
    "source": "generated",
    "rows": "12",
    "rate": "0",
    "prompt_tokens": "40",
    "shared_tokens": "32",
    "answer_tokens": "8",
}


def slow_engine() -> FakeEngine:
    engine = FakeEngine()
    engine.runner.step_s = 0.02
    return engine


async def start(api: Api, *, files: Any = None, **values: str) -> Response:
    form = {**SMALL, **values}
    return await api.client.post("/load", data=form, files=files, headers=HTML, follow_redirects=False)


async def run_to_end(api: Api) -> loads_module.LoadView:
    await until(lambda: not api.plugin.loads.is_active)
    view = api.plugin.loads.describe()
    assert view is not None
    return view


async def test_the_page_offers_sources_and_says_that_nothing_was_sent() -> None:
    async with running_api() as api:
        page = (await api.client.get("/load", headers=HTML)).text
        for title in (
            "MT-bench questions",
            "Azure chat traffic",
            "Mooncake",
            "Equal requests",
            "A file of yours",
        ):
            assert title in page
        assert "Nothing has been sent" in page
        assert "every 1s" not in page


async def test_a_run_goes_through_the_engine_and_its_figures_stay() -> None:
    async with running_api() as api:
        answer = await start(api)
        assert (answer.status_code, answer.headers["location"]) == (303, "/load")
        view = await run_to_end(api)

        assert (view.state, view.num_planned, view.num_finished, view.num_failed) == ("finished", 12, 12, 0)
        assert view.num_tokens == 96
        assert view.ttft.p50_s is not None
        assert view.between.p95_s is not None
        page = (await api.client.get("/load", headers=HTML)).text
        assert "<b>12</b> of 12 requests done" in page
        assert 'id="field-rows" value="12"' in page  # the form as it was


async def test_its_requests_are_recorded_as_load() -> None:
    async with running_api() as api:
        await start(api)
        await run_to_end(api)
        await api.plugin.writer.settle()

        rows = fetch(api.plugin.database.path, "SELECT kind, status, count(*) FROM requests GROUP BY 1, 2")
        assert rows == [("load", "finished", 12)]


async def test_progress_is_shown_and_a_run_can_be_stopped() -> None:
    async with running_api(slow_engine()) as api:
        await start(api, answer_tokens="80", rows="50", concurrency="4")
        await until(lambda: api.plugin.hub.snapshot is not None and api.plugin.hub.snapshot.step > 3)
        part = (await api.client.get("/load/run")).text
        assert 'hx-get="/load/run"' in part
        assert 'data-state="running"' in part

        answer = await api.client.post("/load/stop", headers={"hx-request": "true"})
        assert answer.status_code == 200
        view = await run_to_end(api)
        assert view.state == "stopped"
        assert view.num_cut_off > 0
        assert view.num_not_sent > 0
        assert view.num_done + view.num_cut_off + view.num_not_sent == 50
        part = (await api.client.get("/load/run")).text
        assert 'data-state="stopped"' in part
        assert "Stopped by hand." in part
        assert "hx-trigger" not in part.partition("<header")[0]
        await until(lambda: api.plugin.host.num_open == 0)


async def test_stopping_without_a_run_or_without_scripts_leads_back() -> None:
    async with running_api() as api:
        answer = await api.client.post("/load/stop", headers=HTML, follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (303, "/load")


async def test_one_run_at_a_time() -> None:
    async with running_api(slow_engine()) as api:
        await start(api, answer_tokens="80")
        answer = await start(api)
        assert answer.status_code == 409
        assert "A load is running; stop it" in answer.text
        await api.client.post("/load/stop")
        await run_to_end(api)
        assert (await start(api)).status_code == 303


async def test_copies_find_the_blocks_of_the_first_one() -> None:
    async with running_api() as api:
        await start(api, rows="2", copies="4", concurrency="1")
        assert (await run_to_end(api)).num_finished == 8
        await api.plugin.writer.settle()

        query = "SELECT num_cached_tokens FROM requests ORDER BY arrived_ns"
        assert [count for (count,) in fetch(api.plugin.database.path, query)][1:4] == [
            36,
            36,
            36,
        ]  # of 40, in blocks of 4; the last token is computed


@pytest.mark.parametrize("source", ["azure-conv", "mooncake"])
async def test_shipped_traces_run_and_rows_over_the_context_are_counted(source: str) -> None:
    async with running_api() as api:
        await start(api, source=source, speed="0", scale="200", rows="10")
        view = await run_to_end(api)
        assert view.num_failed == 0
        assert view.num_finished + view.num_skipped == 10
        assert view.num_finished > 0


async def test_conversations_send_their_turns_one_after_another() -> None:
    async with running_api(FakeEngine(max_model_len=2048, num_blocks=256)) as api:
        content = b'{"turns": ["first", "second"]}\n{"turns": ["only"]}\n'
        await start(api, source="file", max_tokens="4", files={"file": ("my.jsonl", content)})
        view = await run_to_end(api)
        assert (view.title, view.num_planned, view.num_finished) == ("my.jsonl", 3, 3)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "my.csv: the file is empty"),
        (b"\xff\xfe\x00", "my.csv: line 1 or a later one is not UTF-8"),
        (
            b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,ten,1",
            "my.csv: line 2, field ContextTokens",
        ),
        (b'{"turns": []}', "my.csv: line 1, field turns"),
    ],
)
async def test_a_bad_file_is_named_with_line_and_field(content: bytes, said: str) -> None:
    async with running_api() as api:
        answer = await start(api, source="file", files={"file": ("my.csv", content)})
        assert answer.status_code == 422
        assert said in answer.text
        assert "/tmp" not in answer.text  # noqa: S108 - where it lay is nobody's business


async def test_a_file_that_is_too_large_is_refused() -> None:
    async with running_api() as api:
        answer = await start(api, source="file", files={"file": ("my.csv", bytes(6 * 2**20))})
        assert answer.status_code == 413


async def test_requests_that_all_outgrow_the_context_are_not_started() -> None:
    async with running_api() as api:
        answer = await start(api, prompt_tokens="5000")
        assert answer.status_code == 422
        assert "None of the 12 requests fits into the context of 128 tokens" in answer.text


async def test_what_is_no_form_is_a_client_error() -> None:
    async with running_api() as api:
        for content, kind in (
            (b"source=%ff%fe", "application/x-www-form-urlencoded"),
            (b"\xff\xfe", "application/x-www-form-urlencoded"),
            (b"--b\r\n", "multipart/form-data; boundary=b"),
            (b"hello", "multipart/form-data"),
            (b"", "text/plain"),
        ):
            answer = await api.client.post("/load", content=content, headers={"content-type": kind})
            assert 400 <= answer.status_code < 500, content
        assert not api.plugin.loads.is_active


async def test_errors_keep_what_was_typed_and_are_escaped() -> None:
    async with running_api() as api:
        answer = await start(api, rows="<b>1</b>")
        assert answer.status_code == 422
        assert "&lt;b&gt;1&lt;/b&gt;" in answer.text
        assert "<b>1</b>" not in answer.text


async def test_while_the_model_loads_the_page_says_so() -> None:
    engine = FakeEngine()
    engine.load_gate.clear()
    async with running_api(engine, wait_ready=False) as api:
        answer = await start(api)
        assert answer.status_code == 503
        assert "still loading" in answer.text
        engine.load_gate.set()


async def test_failures_are_counted_by_name() -> None:
    async with running_api(FakeEngine(max_waiting=1, max_num_seqs=1)) as api:
        await start(api, concurrency="12", answer_tokens="40")
        view = await run_to_end(api)
        assert view.num_failed > 0
        assert [name for name, _ in view.errors] == ["queue_full"]
        assert view.num_finished + view.num_failed == 12
        assert "queue_full" in (await api.client.get("/load/run")).text


async def test_an_engine_that_fails_ends_the_run_with_the_reason() -> None:
    async with running_api(slow_engine()) as api:
        await start(api, rows="60", answer_tokens="80", concurrency="2")
        await until(lambda: api.plugin.host.num_open > 0)
        api.plugin.host._thread._events.on_failed("out of memory", "out of memory")
        view = await run_to_end(api)
        assert view.state == "stopped"
        assert "out of memory" in view.reason


async def test_a_run_does_not_keep_the_server_from_stopping() -> None:
    async with served_api(slow_engine(), shutdown_timeout=60.0) as api:
        answer = await api.client.post("/load", data={**SMALL, "answer_tokens": "80", "rows": "500"})
        assert answer.status_code in {200, 303}
        await until(lambda: api.plugin.host.num_open > 0)
    view = api.plugin.loads.describe()
    assert view is not None
    assert (view.state, view.reason) == ("stopped", "The server is shutting down.")
