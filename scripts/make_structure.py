"""Write the list of modules in `docs/structure.md` from the first sentence of each module.

Run from anywhere: `python scripts/make_structure.py`; with `--check`, exit code 1 if the list is stale.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = "docs/structure.md"
SUFFIXES = {".py", ".js", ".h", ".cpp"}
FOLDERS = ("engine", "app", "static/js", "bench", "scripts")
START, END = "<!-- modules: written by scripts/make_structure.py -->", "<!-- end of modules -->"


def first_sentence(path: Path) -> str:
    """Return what a module says about itself: docstring, leading comment, or nothing."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(source)) or ""
    else:
        lines = source.splitlines()
        first = next((index for index, line in enumerate(lines) if line.startswith("//")), len(lines))
        last = next((i for i in range(first, len(lines)) if not lines[i].startswith("//")), len(lines))
        text = "\n".join(line.removeprefix("//").strip() for line in lines[first:last])
    paragraph = " ".join(text.split("\n\n")[0].split())
    return paragraph.split(". ")[0].removesuffix(".")


def module_lines(root: Path) -> Iterator[str]:
    """Yield the list, a heading per folder and a line per module that is not empty."""
    for top in FOLDERS:
        paths = [path for path in (root / top).rglob("*") if path.suffix in SUFFIXES]
        for folder in sorted({path.parent for path in paths}):
            described = [
                (path.name, sentence)
                for path in sorted(paths)
                if path.parent == folder and (sentence := first_sentence(path))
            ]
            if described:
                yield f"### {folder.relative_to(root).as_posix()}\n"
                yield from (f"- `{name}`: {sentence}" for name, sentence in described)
                yield ""


def render(root: Path) -> tuple[str, str]:
    """Return the document as it is and as it should be."""
    present = (root / DOCUMENT).read_text(encoding="utf-8")
    before, rest = present.split(START)
    after = rest.split(END)[1]
    return present, f"{before}{START}\n\n" + "\n".join(module_lines(root)) + f"\n{END}{after}"


def main() -> int:
    """Write the document, or only compare it."""
    present, wanted = render(ROOT)
    if present == wanted:
        return 0
    if "--check" in sys.argv[1:]:
        print(f"{DOCUMENT} is stale; run: python scripts/make_structure.py")
        return 1
    (ROOT / DOCUMENT).write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
