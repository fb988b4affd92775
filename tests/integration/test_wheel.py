"""The wheel carries everything that a server needs, and finds it there."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROBE = """
import json, sys
sys.path.insert(0, sys.argv[1])
from app.resources import data_file, resource_dir
print(json.dumps({
    "folders": {name: str(resource_dir(name)) for name in ("templates", "static", "migrations")},
    "data": str(data_file("mooncake.jsonl")),
}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = ["-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    result = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    [path] = folder.glob("pageglass-*-py3-none-any.whl")
    return path


def files_of(folder: Path) -> set[str]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.parent.name != "__pycache__")
    return {path.relative_to(folder).as_posix() for path in files}


def test_resources_are_found_inside_the_wheel(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)

    result = subprocess.run(
        [sys.executable, "-I", "-c", PROBE, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    found = json.loads(result.stdout)
    for name, folder in found["folders"].items():
        assert folder == str(tmp_path / "app" / "_resources" / name)
        assert files_of(Path(folder)) == files_of(ROOT / name)
    assert found["data"] == str(tmp_path / "app" / "data" / "mooncake.jsonl")
    assert Path(found["data"]).is_file()


def test_wheel_holds_the_two_packages_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()

    assert {name.split("/")[0] for name in names} == {"app", "engine", "pageglass-0.1.0.dist-info"}
    assert not [name for name in names if "__pycache__" in name or name.endswith(".gguf")]


def test_wheel_carries_the_sources_of_the_kernels(wheel: Path) -> None:
    sources = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "engine").rglob("*")
        if path.suffix in {".h", ".cpp", ".map"}
    }
    assert "engine/kernels/cpu/api.cpp" in sources
    assert sources <= set(zipfile.ZipFile(wheel).namelist())


def test_wheel_offers_the_command_and_carries_the_licences(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        entry_points = archive.read("pageglass-0.1.0.dist-info/entry_points.txt").decode()
        licences = [name for name in archive.namelist() if name.endswith("LICENSE")]

    assert "pageglass = app.__main__:run" in entry_points
    assert "pageglass-0.1.0.dist-info/licenses/LICENSE" in licences
    assert "app/_resources/static/vendor/htmx-4.0.1/LICENSE" in licences
