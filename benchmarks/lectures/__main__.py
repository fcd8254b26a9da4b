"""What the lectures measured, beside what Penstock predicts for the same models and machines.

    python -m benchmarks.lectures [--only PipeDream] [--page]

Predictions come from the catalogue's V100 and Titan X and from nothing that was measured for these
results; no number is adjusted. ``--page`` writes docs/lectures-results.md. It takes some minutes.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.lectures.answers import PARTS, Answer

PAGE = Path(__file__).parents[2] / "docs" / "lectures-results.md"
_HEAD = """# What the lectures measured

`python -m benchmarks.lectures --page` writes this page: each result of the five lectures, and what
Penstock predicts for that model on that hardware from the [catalogue](estimating.md) alone: nobody
here has the machines. Nothing is adjusted to fit, and a miss is shown as one. Where a curve's
values are not printed, its direction is checked. Minibatches are not in the lectures, so the
papers' or usual ones are taken. Data parallelism is Penstock's of today, which sums inside hosts
first and while the backward runs: it is often faster than the one that was measured, and speed-ups
over it are smaller. [The lectures, hands on](lectures.md) has the commands that show each idea.
"""
_FOOT = """
## Not here

Time to accuracy stands in [convergence](convergence.md), on small tasks. Energy was not measured:
no machine here tells joules. Not predicted yet: PipeDream-2BW's 20 × over Megatron's model
parallelism and 3.2 × over GPipe, Hydra's 90 % below GPipe, GPipe's AmoebaNet.
"""


def shown(answers: Sequence[Answer]) -> list[tuple[str, ...]]:
    """The rows of a table, as text."""
    return [
        (
            answer.result,
            answer.published,
            answer.predicted,
            _verdict(answer),
            answer.note,
        )
        for answer in answers
    ]


def _verdict(answer: Answer) -> str:
    if answer.ratio is not None:
        return f"{answer.ratio:.2f}"
    return "" if answer.holds is None else "as published" if answer.holds else "**missed**"


_COLUMNS = ("result", "published", "predicted", "ratio", "note")


def _section(title: str, answers: Sequence[Answer]) -> str:
    lines = [f"\n## {title}\n", f"| {' | '.join(_COLUMNS)} |", "|---|---|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in shown(answers)]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="parts whose title has this in it")
    parser.add_argument("--page", action="store_true", help=f"write docs/{PAGE.name}")
    options = parser.parse_args()
    if options.page and options.only:
        parser.error("--page has all parts: leave out --only")
    warnings.simplefilter("ignore")  # each estimate says that it is one; so does the page
    console, text = Console(), _HEAD
    for title, part in PARTS.items():
        if options.only.lower() not in title.lower():
            continue
        answers = [*part()]
        table = Table(*_COLUMNS, title=title)
        for row in shown(answers):
            table.add_row(*row)
        console.print(table)
        text += _section(title, answers)
    if options.page:
        PAGE.write_text(text + _FOOT)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
