"""The examples in README.md do what it says, against a real server."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from tests.support.server import REPOSITORY, ServerProcess

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
README_URL = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--num-blocks", "256", is_forked=True) as process:
        yield process


def shorten(example: str) -> str:
    """Ask for fewer tokens than the example does."""
    assert "100" in example
    return example.replace("100", "10")


def test_python_example_prints_an_answer(server: ServerProcess) -> None:
    [example] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert README_URL in example

    result = subprocess.run(
        [sys.executable, "-c", shorten(example).replace(README_URL, server.url)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert result.returncode == 0, result.stderr
    assert len(result.stdout.split()) > 2


CURL_EXAMPLES = re.findall(r"^    (curl .*?\}')$", README, re.DOTALL | re.MULTILINE)


def test_there_is_an_example_with_a_priority_and_one_that_streams() -> None:
    assert ["priority" in example for example in CURL_EXAMPLES] == [True, False]
    assert ["stream" in example for example in CURL_EXAMPLES] == [False, True]


@pytest.mark.parametrize("example", CURL_EXAMPLES)
def test_curl_examples_give_an_answer(server: ServerProcess, example: str) -> None:
    words = shlex.split(example)
    [url] = [word for word in words if word.startswith("http")]
    header, body = words[words.index("-H") + 1], words[words.index("-d") + 1]
    assert (words[0], header) == ("curl", "Content-Type: application/json")

    response = httpx.post(
        url.replace(README_URL, server.url),
        content=shorten(body),
        headers={"Content-Type": "application/json"},
        timeout=120,
    )

    assert response.status_code == 200
    if "stream" in example:
        assert response.text.rstrip().endswith("data: [DONE]")
    else:
        assert response.json()["choices"][0]["text"]


@pytest.mark.parametrize("page", re.findall(r"\]\(([^)#:]+)\)", README))
def test_linked_files_and_folders_exist(page: str) -> None:
    assert (REPOSITORY / page).exists()
