import json
from pathlib import Path

import pytest

from app.load.files import LoadError
from app.load.prompts import read_prompts
from app.resources import data_file


def write(path: Path, *records: object) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records), encoding="utf-8")
    return path


def test_turns_are_read_in_order_up_to_the_row_limit(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"turns": ["a", "b"]}, {"turns": ["c"], "category": "x"}, {"bad": 1})

    assert read_prompts(path, max_rows=2) == [("a", "b"), ("c",)]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a"}, "line 2, field turns: missing"),
        ({"turns": "a"}, "line 2, field turns: not a list"),
        ({"turns": []}, "line 2, field turns: not a list"),
        ({"turns": ["a", 1]}, "line 2, field turns: each turn"),
        ({"turns": [" "]}, "line 2, field turns: each turn"),
        (["a"], "line 2 is not a JSON object"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, record: object, message: str) -> None:
    path = write(tmp_path / "p.jsonl", {"turns": ["a"]}, record)

    with pytest.raises(LoadError, match=message):
        read_prompts(path, max_rows=10)


def test_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="the file is empty"):
        read_prompts(write(tmp_path / "p.jsonl"), max_rows=10)


def test_shipped_prompts_are_valid() -> None:
    conversations = read_prompts(data_file("mt-bench.jsonl"), max_rows=1000)

    assert len(conversations) == 80
    assert {len(turns) for turns in conversations} == {2}
