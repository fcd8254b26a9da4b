"""What the lectures measured, beside what Penstock predicts for the same models and machines.

    python -m benchmarks.lectures [--only PipeDream] [--page]
    python -m benchmarks.lectures --measure [--keep]

Predictions come from the catalogue's V100 and Titan X and from nothing that was measured for these
results; no number is adjusted. ``--page`` writes docs/lectures-results.md, with ``--only`` those
parts of it. All of them take a quarter of an hour. ``--measure`` takes, in three minutes, the
figures of the column "measured here".
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.common.alone import publish
from benchmarks.lectures.answer import COLUMNS, Answer, shown
from benchmarks.lectures.answers import PARTS
from benchmarks.lectures.measured import accuracy_section, measure

PAGE = Path(__file__).parents[2] / "docs" / "lectures-results.md"
_HEAD = """# What the lectures measured

`python -m benchmarks.lectures --page` writes this page: each result of the five lectures, and what
Penstock predicts for that model on that hardware from the [catalogue](estimating.md) alone: nobody
here has the machines. Nothing is adjusted to fit, and a miss is shown as one. Where a curve's
values are not printed, its direction is checked. Minibatches are not in the lectures, so the
papers' or usual ones are taken. Data parallelism is Penstock's of today, which sums inside hosts
first and while the backward runs: it is often faster than the one that was measured, and speed-ups
over it are smaller. "Measured here" is what two cores show of the same effect, on emulated devices
or for real (`--measure`). [The lectures, hands on](lectures.md) has the commands that show each
idea.
"""
_FOOT = """
## Not here

Joules: no machine here tells them. Which minibatches were run, with which microbatches, and for GPT
and AmoebaNet of which sizes, the lectures do not say: those here are choices, and "up to" is of the
few that were tried. Hydra's devices are taken to read 6 GB/s from main memory each.
"""


def _section(title: str, answers: Iterable[Answer]) -> str:
    lines = [f"\n## {title}\n", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    lines += [f"| {' | '.join(row)} |" for row in shown(answers)]
    return "\n".join(lines) + "\n"


def sections_of(page: str) -> dict[str, str]:
    """A page's sections by their titles."""
    parts = re.split(r"(?m)^(?=\n## )", page)
    return {part.splitlines()[1].removeprefix("## "): part for part in parts if "## " in part[:4]}


def _answered(title: str, console: Console) -> list[Answer]:
    answers = [*PARTS[title]()]
    table = Table(*COLUMNS, title=title)
    for row in shown(answers):
        table.add_row(*row)
    console.print(table)
    return answers


def predict(only: str, writes_page: bool) -> int:
    """Answer the parts whose title has ``only`` in it, and write them into the page."""
    warnings.simplefilter("ignore")  # each estimate says that it is one; so does the page
    console = Console()
    sections = sections_of(PAGE.read_text()) if PAGE.exists() else {}
    for title in PARTS:
        if only.lower() in title.lower():
            sections[title] = _section(title, _answered(title, console))
    if writes_page:
        absent = [title for title in PARTS if title not in sections]
        if absent:
            sys.exit(f"the page has no part {absent[0]!r} yet: write all of it, without --only")
        body = "".join(sections[title] for title in PARTS)
        PAGE.write_text(_HEAD + body + accuracy_section() + _FOOT)
    return 0


def main() -> int:
    """Predict, or measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="parts whose title has this in it")
    parser.add_argument("--page", action="store_true", help=f"write docs/{PAGE.name}")
    parser.add_argument("--measure", action="store_true", help="what this machine shows of it")
    options = parser.parse_args()
    if not options.measure:
        return predict(options.only, options.page)
    if options.only or options.page:
        parser.error("--measure takes all figures and writes no page: leave out --only and --page")
    measure()
    return 0


if __name__ == "__main__":
    if "--measure" in sys.argv:
        publish(main)
    else:
        raise SystemExit(main())
