import asyncio

from app.request_stream import RequestStream, StreamFailure
from engine.records import TokenOutput


def output(token_id: int, choice_index: int = 0, finish_reason: str | None = None) -> TokenOutput:
    return TokenOutput(
        seq_id=1, request_id="r", choice_index=choice_index, token_id=token_id, finish_reason=finish_reason
    )


async def test_items_come_in_order_and_then_nothing() -> None:
    stream = RequestStream("r", 1)
    stream.put(output(1))
    stream.put(output(2, finish_reason="length"))
    assert [item.token_id for item in await stream.take()] == [1, 2]
    assert stream.is_closed
    assert await stream.take() == []
    assert await stream.take() == []


async def test_the_stream_closes_with_the_last_choice() -> None:
    stream = RequestStream("r", 2)
    closed = []
    for item in (output(1, 0, "length"), output(1, 1, "stop"), output(9, 0)):
        stream.put(item)
        closed.append(stream.is_closed)
    assert closed == [False, True, True]
    assert len(await stream.take()) == 2


async def test_a_reader_that_waits_is_woken_by_an_item_and_by_a_failure() -> None:
    stream = RequestStream("r", 1)
    reader = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    stream.put(output(1))
    assert len(await reader) == 1
    reader = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    stream.fail(StreamFailure("server_shutdown", "bye"))
    assert await reader == []
    assert stream.failure == StreamFailure("server_shutdown", "bye")


async def test_a_cancelled_reader_loses_nothing() -> None:
    stream = RequestStream("r", 1)
    reader = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    stream.put(output(1))
    reader.cancel()
    await asyncio.wait([reader])
    assert len(await stream.take()) == 1


async def test_what_came_before_a_failure_is_still_read_and_only_the_first_failure_counts() -> None:
    stream = RequestStream("r", 1)
    stream.put(output(1))
    stream.fail(StreamFailure("first", ""))
    stream.fail(StreamFailure("second", ""))
    assert [item.token_id for item in await stream.take()] == [1]
    assert stream.failure == StreamFailure("first", "")


async def test_an_abort_by_somebody_else_is_a_failure() -> None:
    stream = RequestStream("r", 1)
    stream.put(output(-1, finish_reason="abort"))
    assert stream.failure is not None
    assert stream.failure.code == "request_aborted"


async def test_a_choice_that_could_not_be_computed_says_why() -> None:
    stream = RequestStream("r", 1)
    stream.put(output(-1, finish_reason="error"))
    assert stream.failure is not None
    assert stream.failure.code == "model_error"
