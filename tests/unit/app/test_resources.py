from pathlib import Path
from typing import get_args

import pytest

from app import resources
from app.resources import ResourceName, data_file, resource_dir

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("name", get_args(ResourceName))
def test_checkout_uses_the_folders_at_the_repository_root(name: ResourceName) -> None:
    assert resource_dir(name) == ROOT / name


def test_packaged_folder_comes_before_one_beside_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site-packages" / "app"
    (package / "_resources" / "static").mkdir(parents=True)
    (package.parent / "static").mkdir()
    monkeypatch.setattr(resources, "_PACKAGE", package)

    assert resource_dir("static") == package / "_resources" / "static"


def test_incomplete_installation_is_an_error_that_names_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "_PACKAGE", tmp_path / "app")

    with pytest.raises(FileNotFoundError, match="'templates' is missing"):
        resource_dir("templates")


@pytest.mark.parametrize("name", ["README.md", "azure-conv.csv", "mooncake.jsonl", "mt-bench.jsonl"])
def test_shipped_data_exists(name: str) -> None:
    assert data_file(name).is_file()
