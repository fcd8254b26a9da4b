"""Layouts that others published for one model on one cluster, in the order in which they are
predicted: does the best one that they measured come first?

``python -m benchmarks.predicting.published_ranks [--rows FILE] [--keep]`` prints for each source in
how many cases the published best is predicted to be the first, or among the first three, and what
it would cost to follow the prediction blindly.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics as st
import warnings
from collections import defaultdict
from collections.abc import Iterable
from contextlib import redirect_stdout, suppress
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.alone import RESULTS
from benchmarks.predicting.published import ROWS, Comparison, compared
from benchmarks.predicting.published_steps import NotPredictedError

LEAST_LAYOUTS = 4
"""Layouts of a case: a choice among three has its best among the first three anyhow."""

FIRST = 3
"""Among so many of the predictions the published best is wanted."""

_LAYOUT = ("tp", "cp", "pp", "dp", "micro_batch", "schedule", "chunks_per_rank", "recompute", "sp")
_MODEL = ("layers", "hidden", "heads", "ffn", "vocab", "seq")


class PublishedCase(NamedTuple):
    """Layouts of one model on one cluster, with the same rows in a step.

    Attributes:
        name: of the source and the model.
        group: of the source, as ``published`` has it.
        layouts: the fastest run of each, the one that is predicted to be fastest first.
    """

    name: str
    group: str
    layouts: tuple[Comparison, ...]

    @property
    def place(self) -> int:
        """The place of the published best among the predictions, from 1."""
        best = min(self.layouts, key=lambda run: run.measured)
        return 1 + self.layouts.index(best)

    @property
    def regret(self) -> float:
        """How much longer the layout takes that is predicted to be the best, than the best."""
        return self.layouts[0].measured / min(run.measured for run in self.layouts) - 1


def published_cases(rows: Iterable[dict[str, Any]]) -> list[PublishedCase]:
    """The cases with enough layouts that can be predicted."""
    runs: dict[tuple[object, ...], dict[tuple[object, ...], Comparison]] = defaultdict(dict)
    for row in rows:
        with suppress(NotPredictedError):
            run = compared(row)
            others, layout = runs[_case(row)], tuple(str(row.get(name)) for name in _LAYOUT)
            if layout not in others or run.measured < others[layout].measured:
                others[layout] = run
    cases = []
    for own in runs.values():
        if len(own) >= LEAST_LAYOUTS:
            ordered = sorted(own.values(), key=lambda run: run.predicted)
            row = ordered[0].setting.row
            name = f"{row['id'].partition('/')[0]}, {row['model'].get('name')}, {row['gpus']} GPUs"
            name += f", {row['global_batch']} rows"
            cases.append(PublishedCase(name, ordered[0].group, tuple(ordered)))
    return cases


def _case(row: dict[str, Any]) -> tuple[object, ...]:
    """What rows have in common that differ by layout only."""
    model = tuple(row["model"].get(name) for name in _MODEL)
    names = ("software", "device", "gpus", "gpus_per_node", "inter_link", "precision")
    shared = tuple(str(row.get(name)) for name in (*names, "global_batch", "zero"))
    return (row["id"].partition("/")[0], *model, *shared)


def print_cases(cases: list[PublishedCase]) -> None:
    """A line per source, and the cases in which the best is not among the first three."""
    print(f"{'source':28s}{'cases':>6s}{'layouts':>9s}{'first':>7s}{'in 3':>7s}{'regret':>9s}")
    groups = defaultdict(list)
    for case in cases:
        groups[case.group].append(case)
    for group, own in [*sorted(groups.items()), ("all", cases)]:
        layouts = st.median(len(case.layouts) for case in own)
        first, three = (sum(case.place <= most for case in own) for most in (1, FIRST))
        regret = st.mean(case.regret for case in own)
        shares = f"{first / len(own):7.0%}{three / len(own):7.0%}{regret:9.1%}"
        print(f"{group:28s}{len(own):6d}{layouts:9g}{shares}")
    missed = [case for case in cases if case.place > FIRST]
    print(f"\n{len(missed)} cases in which the published best is not among the first three:")
    for case in sorted(missed, key=lambda case: -case.place):
        best = min(case.layouts, key=lambda run: run.measured)
        print(
            f"  {case.name}: {_layout(best)} is number {case.place} of {len(case.layouts)}; the "
            f"first, {_layout(case.layouts[0])}, takes {case.regret:.1%} longer"
        )


def _layout(run: Comparison) -> str:
    row = run.setting.row
    return f"tp {row['tp']} pp {row['pp']} dp {row['dp']}, {row['micro_batch']} rows at once"


def main() -> None:
    """Rank all layouts of a file and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, default=ROWS, help="a file of rows (.jsonl)")
    parser.add_argument("--keep", action="store_true", help="keep what it prints")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    rows = [json.loads(line) for line in arguments.rows.read_text().splitlines() if line.strip()]
    printed = io.StringIO()
    with redirect_stdout(printed):
        print_cases(published_cases(rows))
    print(printed.getvalue(), end="")
    if arguments.keep:
        head = "$ python -m benchmarks.predicting.published_ranks"
        where = f"{date.today()}, nothing is timed, so it prints the same on any machine"
        text = f"{head}\n{where}\n\n{printed.getvalue()}"
        (RESULTS / "predicting.published_ranks.txt").write_text(text)


if __name__ == "__main__":
    main()
