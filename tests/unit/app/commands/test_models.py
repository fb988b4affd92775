from pathlib import Path

import pytest
from click.testing import CliRunner

from app import model_store
from app.commands.models import models
from app.model_store import FetchProgress, Report


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PAGEGLASS_MODELS", str(tmp_path))
    return tmp_path


def test_list_says_how_to_get_a_model_when_there_is_none(store: Path) -> None:
    result = CliRunner().invoke(models, ["list"])

    assert result.exit_code == 0
    assert result.stdout == f"No models in {store}. Get the default one: pageglass models fetch\n"


def test_list_shows_name_size_path_and_default(store: Path) -> None:
    (store / "smollm2-135m-instruct.gguf").write_bytes(b"0" * 1_500_000)
    (store / "b.gguf").touch()

    result = CliRunner().invoke(models, ["list"])

    assert result.stdout.splitlines() == [
        f"b                           0.0 MB  {store}/b.gguf",
        f"smollm2-135m-instruct       1.5 MB  {store}/smollm2-135m-instruct.gguf  (default)",
    ]


@pytest.mark.parametrize(
    ("stages", "word"), [(["checking"], "present"), (["downloading", "unpacking"], "fetched")]
)
def test_fetch_says_whether_it_had_to_work(
    store: Path, monkeypatch: pytest.MonkeyPatch, stages: list[str], word: str
) -> None:
    def fake_fetch(name: str, on_progress: Report) -> Path:
        for stage in stages:
            on_progress(FetchProgress(stage, 0.5))
        return store / f"{name}.gguf"

    monkeypatch.setattr(model_store, "fetch", fake_fetch)

    result = CliRunner().invoke(models, ["fetch", "tiny"])

    assert result.exit_code == 0
    assert result.stdout == f"tiny: {word}, {store}/tiny.gguf\n"
    assert ("tiny: downloading 50%" in result.stderr) is (word == "fetched")
