"""Opening the kernels: what cannot be loaded is made anew, or is one line that says why not."""

from pathlib import Path

import pytest

from engine import native_backend
from engine.errors import KernelsUnavailableError
from engine.native_backend import open_library


def test_a_library_that_can_neither_be_loaded_nor_removed_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "damaged.so"
    path.write_bytes(b"")

    def refuse(self: Path, *, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(native_backend, "build", lambda isa, *, on_wait: path)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(KernelsUnavailableError, match=r"damaged\.so.*remove.*Permission denied") as caught:
        open_library("avx2", lambda waited_s: None)
    assert "\n" not in str(caught.value)
