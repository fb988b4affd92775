import base64
import contextlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import HistoryUnavailableError
from app.history.columns import pack_numbers, unpack_numbers
from app.history.record_codec import (
    decode_records,
    decode_state,
    encode_columns,
    encode_plain,
    encode_state,
    hide_tokens,
)
from engine.config import EngineConfig
from engine.records import (
    Admitted,
    Arrived,
    BatchEntry,
    BlockOp,
    BlockOpKind,
    Event,
    Finished,
    Loaded,
    Policies,
    Preempted,
    PrefixMiss,
    Reset,
    Stalled,
    StepRecord,
)
from engine.snapshot import EngineSnapshot
from tests.builders import random_run
from tests.support import old_recording
from tests.support.recording import as_json, make_run

SMALL = st.integers(0, 2**32 - 1)
NS = st.integers(0, 2**62)

ENTRIES = st.builds(
    BatchEntry,
    seq_id=SMALL,
    slot=st.integers(-1, 4096),
    num_computed_before=SMALL,
    num_scheduled=SMALL,
    token_id=st.integers(-2, 2**31),
)
OPS = st.builds(
    BlockOp,
    kind=st.sampled_from([int(kind) for kind in BlockOpKind]),
    block_id=SMALL,
    slot=st.integers(-1, 4096),
    arg=st.integers(0, 2**64 - 1),
)
EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(Finished, seq_id=SMALL, slot=SMALL, reason=st.text(), num_output_tokens=SMALL),
    st.builds(Reset, error=st.text()),
    st.builds(
        Preempted,
        seq_id=SMALL,
        slot=SMALL,
        policy=st.text(),
        mode=st.text(),
        num_tokens_lost=SMALL,
        num_blocks_freed=SMALL,
        beneficiary=SMALL,
        candidates=st.lists(st.tuples(SMALL, st.floats(allow_nan=False)), max_size=3),
        num_tokens_kept=SMALL,
        recompute_ns=st.floats(0, 1e18),
        swap_ns=st.floats(0, 1e18),
    ),
    st.builds(
        Admitted,
        seq_id=SMALL,
        slot=SMALL,
        num_tokens=SMALL,
        num_cached_tokens=SMALL,
        resumed=st.booleans(),
        num_host_tokens=SMALL,
        miss=st.one_of(st.none(), st.builds(PrefixMiss, kind=st.text(), position=SMALL, step=SMALL)),
    ),
    st.builds(
        Loaded,
        seq_id=SMALL,
        slot=SMALL,
        num_tokens=SMALL,
        num_blocks=SMALL,
        num_steps=SMALL,
        waited=st.booleans(),
        is_orphan=st.booleans(),
    ),
    st.builds(Policies, policy=st.text(), preemption=st.text(), preemption_mode=st.text()),
    st.builds(Stalled, seq_id=SMALL, num_running=SMALL, num_waiting=SMALL, num_available=SMALL),
)
RECORDS = st.builds(
    StepRecord,
    step=st.just(0),
    kind=st.integers(0, 1),
    t_ns=NS,
    schedule_ns=SMALL,
    forward_ns=SMALL,
    sample_ns=SMALL,
    host_ns=SMALL,
    batch=st.lists(ENTRIES, max_size=4),
    block_ops=st.lists(OPS, max_size=4),
    events=st.lists(EVENTS, max_size=3),
    stop_reason=st.integers(0, 7),
    prefix_pending=st.lists(SMALL, max_size=3),
    token_budget=SMALL,
    num_running=SMALL,
    num_waiting=SMALL,
    num_free=SMALL,
    num_cached=SMALL,
    num_used=SMALL,
    num_host_used=SMALL,
    num_host_pinned=SMALL,
)


def number(records: list[StepRecord], first_step: int) -> list[StepRecord]:
    return [msgspec.structs.replace(record, step=first_step + index) for index, record in enumerate(records)]


@given(st.lists(RECORDS, min_size=1, max_size=6), st.integers(1, 2**40))
@settings(deadline=None, max_examples=150)
def test_any_records_come_back_as_they_were_in_both_forms(records: list[StepRecord], first_step: int) -> None:
    numbered = number(records, first_step)
    assert decode_records(encode_columns(numbered)) == numbered
    assert decode_records(encode_plain(numbered)) == numbered


@pytest.mark.parametrize("fail_rate", [0.0, 0.02])
def test_a_real_run_comes_back_exactly_and_becomes_much_smaller(fail_rate: float) -> None:
    _, records = make_run(5, 512, fail_rate)
    data = encode_columns(records)
    assert decode_records(data) == records
    assert len(data) * 5 < len(encode_plain(records))


def test_a_run_with_a_host_tier_comes_back_exactly() -> None:
    run = random_run(5, 300, policy="priority", num_host_blocks=40, load_steps=3, policy_rate=0.02)
    records = [result.record for _, result in run]
    assert {type(event) for record in records for event in record.events} >= {Loaded, Preempted, Policies}
    assert max(record.num_host_pinned for record in records) > 0
    assert decode_records(encode_columns(records)) == records


def test_recordings_from_before_the_host_tier_are_read_as_without_one() -> None:
    records = decode_records(base64.b64decode(old_recording.COLUMNS))
    assert decode_records(base64.b64decode(old_recording.PLAIN)) == records[:1]
    assert [record.step for record in records] == list(range(1, 9))
    assert {(record.num_host_used, record.num_host_pinned) for record in records} == {(0, 0)}
    snapshot = EngineSnapshot(EngineConfig(num_blocks=10, block_size=4, max_num_seqs=3, max_model_len=40))
    for record in records:
        snapshot.apply(record)  # its counts agree
    old_state = decode_state(base64.b64decode(old_recording.STATE))
    restored = EngineSnapshot.from_state(snapshot.config, old_state)
    for part in ("step", "counts", "waiting", "blocks", "batch", "host", "policies"):
        assert as_json(restored)[part] == as_json(snapshot)[part]
    assert [view.block_table for view in restored.running] == [view.block_table for view in snapshot.running]
    (preempted,) = [event for event in records[5].events if isinstance(event, Preempted)]
    assert (preempted.mode, preempted.candidates) == ("recompute", [(1, -1), (2, -2), (3, -3)])
    arrived = records[0].events[0]
    assert isinstance(arrived, Arrived)
    assert (arrived.request_id, arrived.priority) == ("q0", 0)
    assert decode_records(encode_columns(records)) == records


def test_only_consecutive_steps_make_columns() -> None:
    _, records = make_run(5, 512)
    with pytest.raises(ValueError, match="step 3 is not step 2"):
        encode_columns([records[0], records[2]])


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_numbers_without_a_sign_come_back(values: list[int]) -> None:
    assert unpack_numbers(pack_numbers(values)) == values


@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_numbers_with_a_sign_come_back(values: list[int]) -> None:
    assert unpack_numbers(pack_numbers(values)) == values


def test_a_number_of_more_than_eight_bytes_is_refused() -> None:
    with pytest.raises(OverflowError):
        pack_numbers([2**64])


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_damaged_records_are_refused_or_other_records_and_never_a_crash(
    data: st.DataObject,
) -> None:
    _, records = make_run(5, 40)
    for encoded in (encode_columns(records), encode_plain(records)):
        damaged = bytearray(encoded)
        for _ in range(data.draw(st.integers(1, 3))):
            damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
        cut = data.draw(st.sampled_from([None, data.draw(st.integers(0, len(damaged)))]))
        with contextlib.suppress(HistoryUnavailableError):
            decode_records(bytes(damaged[:cut]))


@pytest.mark.parametrize("data", [b"", b"S", b"Sxxxx", b"C", b"Cxxxx", b"P", b"?", b"P\xc1"])
def test_bytes_of_another_kind_are_refused(data: bytes) -> None:
    with pytest.raises(HistoryUnavailableError):
        decode_records(data)
    with pytest.raises(HistoryUnavailableError):
        decode_state(data)


def test_states_come_back_and_go_on_like_the_original() -> None:
    config, records = make_run(5, 512)
    original = EngineSnapshot(config)
    for record in records[:300]:
        original.apply(record)
    restored = EngineSnapshot.from_state(config, decode_state(encode_state(original.export_state())))
    for record in records[300:]:
        original.apply(record)
        restored.apply(record)
        assert as_json(restored) == as_json(original)


def test_hidden_tokens_keep_what_the_picture_needs() -> None:
    _, records = make_run(5, 512)
    for record in records:
        hidden = hide_tokens(record)
        assert {entry.token_id for entry in hidden.batch} <= {0, -1}
        assert [entry.is_decode for entry in hidden.batch] == [entry.is_decode for entry in record.batch]
        assert msgspec.structs.replace(hidden, batch=[]) == msgspec.structs.replace(record, batch=[])
