"""Starting up must be quick: the page answers while the engine thread imports the heavy packages."""

import subprocess
import sys

import pytest

PROBE = "import sys, {module}; print(*sorted({{'torch', 'transformers', 'numpy'}} & sys.modules.keys()))"


@pytest.mark.parametrize("module", ["app.cli", "app.asgi"])
def test_importing_the_app_imports_no_heavy_package(module: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROBE.format(module=module)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert result.stdout.split() == []
