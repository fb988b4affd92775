"""Compiles the kernels into a shared library, once per instruction set, version and compiler.

Run `python -m engine.kernels.cpu.build` to have it done before a server needs it. Nothing but a C++
compiler is used. A library's name says what it was made from and how long it is, so that neither a stale nor
a truncated one is ever found, and it appears whole or not at all. Who finds another process compiling waits.
"""

import argparse
import fcntl
import hashlib
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import platformdirs

from engine.errors import KernelsUnavailableError
from engine.kernels.cpu.instruction_sets import INSTRUCTION_SETS, runnable

logger = logging.getLogger(__name__)

SOURCE_FOLDER = Path(__file__).resolve().parent
MAIN_SOURCE = "api.cpp"
EXPORTS = "exports.map"

BASE_FLAGS = (
    "-std=c++17", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-fno-math-errno",
    "-Wall", "-Wextra", "-Werror", f"-Wl,--version-script={EXPORTS}",
)  # fmt: skip
FAST_FLAGS = ("-O3",)
SANITIZED_FLAGS = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address")

TYPICAL_BUILD_S = 40.0
"""About what compiling takes; for progress only."""

KEPT_LIBRARIES = 4
"""Libraries of one kind that stay in the folder: several checkouts may share it."""

ADVICE = "install one (Debian: apt-get install g++)"

_SOURCES = ("*.h", "*.cpp", EXPORTS)
_COMPILERS = ("c++", "g++", "clang++")
_TIMEOUT_S = 900.0
_POLL_S = 0.1
_STALE_S = 3600.0
_TEMPORARY_PREFIX = ".making-"
_MAX_REASON_CHARS = 300

OnWait = Callable[[float], None]
"""Gets the seconds that compiling (or waiting for who does) has taken so far; what it raises ends it."""

_Tick = Callable[[], None]


def default_folder() -> Path:
    """Return where libraries are kept: beside the models, in the user's cache folder."""
    return Path(platformdirs.user_cache_dir("pageglass", appauthor=False)) / "kernels"


@dataclass(frozen=True)
class _Recipe:
    """All that a library depends on. `compiler` is None where there is none."""

    kind: str
    flags: tuple[str, ...]
    compiler: tuple[str, ...] | None

    @cached_property
    def source_hash(self) -> str:
        digest = hashlib.sha256(repr(self.flags).encode())
        for path in sorted(path for pattern in _SOURCES for path in SOURCE_FOLDER.glob(pattern)):
            content = path.read_bytes()
            digest.update(f"{path.name} {len(content)}\n".encode() + content)
        return digest.hexdigest()[:16]

    @property
    def pattern(self) -> str:
        """What the name matches, whichever compiler made it."""
        return f"{self.kind}-{self.source_hash}-*.so"

    @cached_property
    def own_pattern(self) -> str:
        """What the name matches if this compiler made it; the number of bytes stands in place of `*`."""
        if self.compiler is None:
            raise KernelsUnavailableError(_missing_compiler_message())
        return self.pattern.replace("*", hashlib.sha256(_version_of(self.compiler)).hexdigest()[:8] + ".*")


def find_library(isa: str, folder: Path | None = None, *, sanitize: bool = False) -> Path | None:
    """Return the library for an instruction set if it is there.

    Without a compiler that runs, one that any compiler made from the same sources counts: an image may be
    built with one and run without.
    """
    return _find(_make_recipe(isa, sanitize=sanitize), folder or default_folder())


def build(
    isa: str, folder: Path | None = None, *, sanitize: bool = False, on_wait: OnWait | None = None
) -> Path:
    """Return the library for an instruction set, compiled now unless it is there.

    Where it cannot be compiled, one that any compiler made from the same sources serves. `folder`: where
    libraries are kept (None: `default_folder`). `sanitize`: with AddressSanitizer, whose runtime must be
    loaded first (`LD_PRELOAD`). Raises `KernelsUnavailableError` with one line that says what is missing or
    wrong.
    """
    folder = folder or default_folder()
    recipe = _make_recipe(isa, sanitize=sanitize)
    found = _find(recipe, folder)
    if found is not None:
        return found
    try:
        return _make(recipe, folder, _make_tick(on_wait))
    except KernelsUnavailableError as error:
        found = _find_whole(folder, recipe.pattern)
        if found is None:
            raise
        logger.warning("%s A library that another compiler made of the same sources serves.", error)
        return found


def _make_tick(on_wait: OnWait | None) -> _Tick:
    """Return what reports the time since now: one clock for waiting and compiling never goes backwards."""
    started_s = time.monotonic()

    def tick() -> None:
        if on_wait is not None:
            on_wait(time.monotonic() - started_s)

    return tick


def _make(recipe: _Recipe, folder: Path, tick: _Tick) -> Path:
    """Compile, unless another process that does so already ends well."""
    own_pattern = recipe.own_pattern
    with _storing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder, tick):
        found = _find_whole(folder, own_pattern)
        if found is not None:
            return found
        with _storing(folder):
            # The linker makes the file with the rights that the umask gives; only the folder is private.
            workplace = tempfile.TemporaryDirectory(
                prefix=_TEMPORARY_PREFIX, dir=folder, ignore_cleanup_errors=True
            )
        with workplace:
            made = Path(workplace.name) / "library.so"
            _compile(recipe, made, tick)
            with _storing(folder), made.open("rb") as file:
                os.fsync(file.fileno())  # or the name might get to the disk before the content
                path = made.replace(folder / own_pattern.replace("*", str(made.stat().st_size)))
        _prune(folder, recipe.kind)
    return path


@contextmanager
def _storing(folder: Path) -> Iterator[None]:
    """Turn what the file system refuses into one line."""
    try:
        yield
    except OSError as error:
        raise KernelsUnavailableError(
            f"The native kernels cannot be stored in {folder} ({error.strerror}); make it writable."
        ) from error


@contextmanager
def _locked(folder: Path, tick: _Tick) -> Iterator[None]:
    """Hold the folder's lock, to save work; who cannot have it in a compiler's time goes on without."""
    try:
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)  # released by the system if this process dies
    except OSError:
        yield
        return
    try:
        deadline_s = time.monotonic() + _TIMEOUT_S
        while _is_held_by_another(number) and time.monotonic() < deadline_s:
            tick()
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(number)


def _is_held_by_another(number: int) -> bool:
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # any other: a file system without locks
        return isinstance(error, BlockingIOError)
    return False


def _make_recipe(isa: str, *, sanitize: bool) -> _Recipe:
    speed_flags = SANITIZED_FLAGS if sanitize else FAST_FLAGS
    return _Recipe(
        kind=f"{isa}-sanitized" if sanitize else isa,
        flags=(*speed_flags, *BASE_FLAGS, *INSTRUCTION_SETS[isa].compiler_flags),
        compiler=_find_compiler(),
    )


def _find_compiler() -> tuple[str, ...] | None:
    """Return the command of the C++ compiler: `CXX`, else the first of the usual names that is there."""
    chosen = _chosen_compiler()
    for command in [chosen] if chosen else [[name] for name in _COMPILERS]:
        path = shutil.which(command[0])
        if path is not None:
            return (path, *command[1:])
    return None


def _chosen_compiler() -> list[str]:
    """Return the words of `CXX`."""
    text = os.environ.get("CXX", "")
    try:
        return shlex.split(text)
    except ValueError:  # a quote without its partner: not found, and then named
        return [text]


def _missing_compiler_message() -> str:
    chosen = _chosen_compiler()
    fault = f"CXX names {chosen[0]!r}, which cannot be run; correct it or unset it" if chosen else ADVICE
    return f"The native kernels need a C++ compiler and there is none; {fault}."


def _version_of(compiler: tuple[str, ...]) -> bytes:
    try:
        result = subprocess.run([*compiler, "--version"], capture_output=True, timeout=60, check=False)  # noqa: S603 - the user's compiler
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsUnavailableError(
            f"The compiler {compiler[0]} cannot be run ({error}); {ADVICE}."
        ) from error
    if result.returncode != 0:
        fault = _first_fault((result.stderr or result.stdout).decode(errors="replace"))
        raise KernelsUnavailableError(
            f"The compiler {compiler[0]} does not work ({compiler[0]} --version failed: {fault}); {ADVICE}."
        )
    return result.stdout


def _find(recipe: _Recipe, folder: Path) -> Path | None:
    pattern = recipe.pattern
    with suppress(KernelsUnavailableError):
        pattern = recipe.own_pattern
    return _find_whole(folder, pattern)


def _find_whole(folder: Path, pattern: str) -> Path | None:
    return next((path for path in sorted(folder.glob(pattern)) if _is_whole(path)), None)


def _is_whole(path: Path) -> bool:
    """Whether a library can be read and is as long as its name says: a truncated one ends the process."""
    try:
        size = path.stat().st_size
    except OSError:
        return False
    return path.suffixes == [f".{size}", ".so"] and os.access(path, os.R_OK)


def _compile(recipe: _Recipe, made: Path, tick: _Tick) -> None:
    assert recipe.compiler is not None
    command = [*recipe.compiler, *recipe.flags, MAIN_SOURCE, "-o", str(made)]
    started_s = time.monotonic()
    with tempfile.TemporaryFile() as output:
        try:
            # A session of its own: Ctrl-C reaches the server alone, which then ends compiler and children.
            process = subprocess.Popen(  # noqa: S603 - the user's compiler
                command, cwd=SOURCE_FOLDER, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise KernelsUnavailableError(
                f"The compiler {command[0]} cannot be run ({error.strerror}); {ADVICE}."
            ) from error
        try:
            _wait(process, tick)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        output.seek(0)
        text = output.read().decode(errors="replace")
    if process.returncode != 0:
        raise KernelsUnavailableError(
            f"Compiling the native kernels with {command[0]} failed: {_first_fault(text)}.", details=text
        )
    if not made.is_file():
        raise KernelsUnavailableError(f"The compiler {command[0]} made no library; {ADVICE}.")
    logger.info("Compiled the kernels for %s in %.0f s", recipe.kind, time.monotonic() - started_s)


def _wait(process: subprocess.Popen[bytes], tick: _Tick) -> None:
    deadline_s = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            process.wait(_POLL_S)
        except subprocess.TimeoutExpired:
            if time.monotonic() > deadline_s:
                raise KernelsUnavailableError(
                    f"Compiling the native kernels did not end within {_TIMEOUT_S:.0f} s."
                ) from None
            tick()
        else:
            return


def _first_fault(text: str) -> str:
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    fault = next(
        (line for line in lines if "error" in line.lower()), lines[0] if lines else "no reason given"
    )
    return fault[:_MAX_REASON_CHARS].rstrip(".")


def _prune(folder: Path, kind: str) -> None:
    """Remove all but the newest libraries of a kind, and what a killed process left."""
    kinds = [path for path in folder.glob(f"{kind}-*.so") if path.name.count("-") == kind.count("-") + 2]
    stale = [
        path for path in folder.glob(f"{_TEMPORARY_PREFIX}*") if time.time() - _changed_s(path) > _STALE_S
    ]
    for path in [*sorted(kinds, key=_changed_s, reverse=True)[KEPT_LIBRARIES:], *stale]:
        shutil.rmtree(path, ignore_errors=True)
        with suppress(OSError):  # a folder, or another process was first, or it belongs to another user
            path.unlink()


def _changed_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # another process was first
        return 0.0


def main(arguments: list[str] | None = None) -> int:
    """Compile for this CPU or as asked; the exit code is 1 if that is not possible."""
    parser = argparse.ArgumentParser(
        prog="python -m engine.kernels.cpu.build",
        description="Compile the native kernels of the CPU, unless that was done before.",
        epilog="The compiler is $CXX, else c++, g++ or clang++. Without kernels the plain torch path serves.",
    )
    parser.add_argument(
        "--isa", choices=INSTRUCTION_SETS, help="instruction set (default: the best that this CPU has)"
    )
    parser.add_argument(
        "--sanitize",
        action="store_true",
        help="with AddressSanitizer, under another name; to use it, start Python with "
        "LD_PRELOAD='libasan.so libstdc++.so' (see g++ -print-file-name) ASAN_OPTIONS=detect_leaks=0",
    )
    parser.add_argument("--quiet", action="store_true", help="say nothing where there is nothing to do")
    parser.add_argument("--folder", type=Path, help="where libraries are kept (default: %(default)s)")
    parser.set_defaults(folder=default_folder())
    options = parser.parse_args(arguments)
    try:
        path = _build_for(options.isa, options.folder, sanitize=options.sanitize)
    except KernelsUnavailableError as error:
        sys.stderr.write(f"{error.details}\n" * bool(error.details))
        sys.stderr.write(f"{error} The plain torch path will serve instead, several times slower.\n")
        return 1
    if not options.quiet:
        sys.stdout.write(f"{path}\n")
    return 0


def _build_for(isa: str | None, folder: Path, *, sanitize: bool) -> Path:
    isa = isa or next(iter(runnable()), None)
    if isa is None:
        raise KernelsUnavailableError(unsupported_cpu_message())
    found = find_library(isa, folder, sanitize=sanitize)
    if found is not None:
        return found
    sys.stderr.write(f"Compiling the kernels for {isa}, once, for about {TYPICAL_BUILD_S:.0f} s ...\n")
    sys.stderr.flush()
    return build(isa, folder, sanitize=sanitize)


def unsupported_cpu_message() -> str:
    """Return the sentence for a machine that the kernels cannot run on."""
    return "The native kernels need Linux on an x86-64 CPU with AVX2, FMA and F16C."


if __name__ == "__main__":
    sys.exit(main())
