"""Shows what two engines gave in the same rounds."""

from dataclasses import asdict

from bench.common import MACHINE_FIGURES, Figures, Yardstick, medians, print_disturbed, print_table

CHANGE_LIMIT = 0.1
"""Change of the yardstick during a sitting above which a warning is printed."""


def print_results(title: str, results: dict[str, list[Figures]]) -> None:
    """Print one side's figures, or both sides' and their ratio, first ÷ second."""
    names, runs = list(results), list(results.values())
    if len(names) == 1:
        print_table([title, names[0]], [[_words(name), value] for name, value in medians(runs[0]).items()])
    else:
        rows = [_compare(name, runs[0], runs[1]) for name in _common_figures(runs[0], runs[1])]
        print_table([title, *names, f"{names[0]} ÷ {names[1]}", "of rounds"], rows)
    for name, figures in results.items():
        print_disturbed(name, figures)


def warn_if_changed(before: Yardstick, after: Yardstick) -> None:
    """Say so if the machine was not the same before and after."""
    changes = [abs(value / asdict(before)[name] - 1) for name, value in asdict(after).items()]
    if max(changes) > CHANGE_LIMIT:
        print(f"The yardstick changed by {max(changes):.0%} meanwhile; the ratio of each round counts more.")


def _common_figures(first: list[Figures], second: list[Figures]) -> list[str]:
    ours = medians(first)
    return [name for name in medians(second) if name in ours and name not in MACHINE_FIGURES]


def _compare(name: str, first: list[Figures], second: list[Figures]) -> list[object]:
    one, other = medians(first)[name], medians(second)[name]
    ratios = [a[name] / b[name] for a, b in zip(first, second, strict=True)]
    return [_words(name), one, other, one / other, f"{min(ratios):.2f}-{max(ratios):.2f}"]


def _words(name: str) -> str:
    return name.replace("_", " ")
