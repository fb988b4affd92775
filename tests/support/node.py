"""Runs the project's JavaScript under node: the system's, or else the one that playwright carries."""

import shutil
import subprocess
from pathlib import Path

import playwright

SCRIPTS = Path(__file__).resolve().parents[1] / "js"
TIMEOUT_S = 120


def run_node(script: str, *arguments: str | Path) -> str:
    """Run `tests/js/<script>` and return what it prints; fails if it fails."""
    node = shutil.which("node") or str(Path(playwright.__file__).with_name("driver") / "node")
    done = subprocess.run(
        [node, SCRIPTS / script, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, f"{script} failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout
