import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "make_structure.py"
names = runpy.run_path(str(SCRIPT))
first_sentence, render = names["first_sentence"], names["render"]


@pytest.mark.parametrize(
    ("name", "source", "sentence"),
    [
        ("a.py", '"""What it does.\n\nMore.\n"""\n', "What it does"),
        ("a.py", '"""One: `a.b`. Two."""\n', "One: `a.b`"),
        ("a.py", "x = 1\n", ""),
        ("a.js", "// Over two\n// lines. And more.\n\n// Other\n", "Over two lines"),
        ("a.js", "const x = 1;\n", ""),
    ],
)
def test_module_is_described_by_its_first_sentence(
    tmp_path: Path, name: str, source: str, sentence: str
) -> None:
    path = tmp_path / name
    path.write_text(source, encoding="utf-8")

    assert first_sentence(path) == sentence


def test_list_is_replaced_and_the_rest_kept(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "engine" / "kv").mkdir(parents=True)
    (tmp_path / "engine" / "core.py").write_text('"""The core."""\n', encoding="utf-8")
    (tmp_path / "engine" / "kv" / "pool.py").write_text('"""The pool."""\n', encoding="utf-8")
    start, end = names["START"], names["END"]
    (tmp_path / "docs" / "structure.md").write_text(f"before\n{start}\nold\n{end}\nafter\n", encoding="utf-8")

    _, wanted = render(tmp_path)

    assert wanted == (
        f"before\n{start}\n\n### engine\n\n- `core.py`: The core\n\n"
        f"### engine/kv\n\n- `pool.py`: The pool\n\n{end}\nafter\n"
    )
