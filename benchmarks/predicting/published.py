"""Runs that others published, predicted from model, layout and device alone.

``python -m benchmarks.predicting.published [--rows FILE]`` prints for each source how far predicted
steps are from measured ones. Nothing is fitted to a row: what the catalogue calls fitted are the
only numbers that ever saw one, and they are counted first.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics as st
import warnings
from collections import Counter, defaultdict
from contextlib import redirect_stdout
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.alone import RESULTS
from benchmarks.predicting.published_steps import (
    NotPredictedError,
    Setting,
    measured_seconds,
    predict,
    setting_of,
)
from penstock.core import catalogue

ROWS = Path("../shared/data/published/runs.jsonl")
_GROUPS = {
    "vtrain-single": "vTrain, one node", "vtrain-multi": "vTrain, several nodes",
    "zerobubble": "zero-bubble", "korthikanti2022": "2205.05198", "bloom": "BLOOM",
    "simumax-b200": "B200, dense", "torchtitan": "torchtitan", "llm-foundry": "llm-foundry",
    "mbridge": "Megatron-Bridge, dense",
}  # fmt: skip
_GOALS = {
    "vTrain, one node": (5, 8), "vTrain, several nodes": (4, 7), "zero-bubble": (3, 4),
    "2205.05198": (3, 4), "BLOOM": (6, 9), "B200, dense": (5, 7), "torchtitan": (8, 12),
    "llm-foundry": (8, 12), "Megatron-Bridge, dense": (8, 12),
}  # fmt: skip


_RESERVED = frozenset({"torchtitan"})
"""Sources that print what the allocator has reserved, of which a model has taken less."""


class Comparison(NamedTuple):
    """A row's prediction beside what was measured."""

    setting: Setting
    group: str
    predicted: float
    measured: float
    memory_error: float | None

    @property
    def error(self) -> float:
        """As a share of what was measured."""
        return self.predicted / self.measured - 1

    @property
    def factor(self) -> float:
        """Measured over predicted."""
        return self.measured / self.predicted


def compared(row: dict[str, Any]) -> Comparison:
    """Predict a row.

    Raises:
        NotPredictedError: it cannot be.
    """
    if row["complete"] == "doubtful":
        raise NotPredictedError("doubtful, as its notes say")
    setting, measured = setting_of(row), measured_seconds(row)
    made = predict(setting)
    said = row.get("peak_memory_gib")
    memory = made.gib / said - 1 if isinstance(said, int | float) else None
    group = next((g for start, g in _GROUPS.items() if row["id"].startswith(start)), "others")
    return Comparison(setting, group, made.seconds, measured, memory)


def print_constants() -> None:
    """Count what was ever fitted, before anything is predicted."""
    fitted = [
        f"{entry.name} {name} = {figure.value:g}"
        for entry in catalogue.software().values()
        for name in ("forward_op_seconds", "backward_op_seconds", "factor")
        if (figure := getattr(entry, name)).source.endswith("-fit")
    ]
    fitted += [
        f"{entry.name} {dtype} = {figure.value:g}"
        for entry in catalogue.devices().values()
        for dtype, figure in entry.efficiency.by_dtype.items()
        if figure.source.endswith("-fit")
    ]
    print(f"{len(fitted)} constants were fitted: {'; '.join(fitted)}")


def print_table(rows: list[Comparison]) -> None:
    """One line per source; rows of which the rules decided a setting stand below."""
    head = (
        f"{'source':28s}{'rows':>5s}{'median':>8s}{'mean':>7s}{'p90':>7s}{'bias':>7s}{'goal':>9s}"
    )
    print(head + f"{'left out':>10s}{'memory':>8s}")
    groups = defaultdict(list)
    for item in rows:
        groups[item.group].append(item)
    for group in sorted(
        groups, key=lambda name: list(_GOALS).index(name) if name in _GOALS else 99
    ):
        stated = [item for item in groups[group] if not item.setting.assumed]
        assumed = [item for item in groups[group] if item.setting.assumed]
        others = [item for item in rows if item.group != group]
        for items, mark in ((stated, ""), (assumed, ", by rules")):
            if items:
                _print_line(group, mark, items, others)


def _print_line(group: str, mark: str, items: list[Comparison], others: list[Comparison]) -> None:
    errors = sorted(abs(item.error) for item in items)
    p90 = errors[min(len(errors) - 1, int(0.9 * len(errors)))]
    bias = st.median(item.error for item in items)
    goal = "{}/{}".format(*_GOALS[group]) if group in _GOALS else ""
    # Without the constant of its own stack, but with that of all other sources instead.
    own = catalogue.software_named(items[0].setting.stack).factor.value
    factor = st.median(item.factor for item in others) / own if others else 1.0
    left_out = st.median(abs(factor * (1 + item.error) - 1) for item in items)
    memory = [abs(item.memory_error) for item in items if item.memory_error is not None]
    print(
        f"{group + mark:28s}{len(items):5d}{st.median(errors):8.1%}{st.mean(errors):7.1%}{p90:7.1%}"
        f"{bias:+7.1%}{goal:>9s}{left_out:10.1%}"
        + (f"{st.median(memory):8.1%}{'*' * (group in _RESERVED)}" if memory else "")
    )


def main() -> None:
    """Predict all rows of a file and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, default=ROWS, help="a file of rows (.jsonl)")
    parser.add_argument("--keep", action="store_true", help="keep what it prints")
    parser.add_argument("--only", default="", help="rows whose id begins so")
    arguments = parser.parse_args()
    printed = io.StringIO()
    with redirect_stdout(printed):
        _print_all(arguments)
    print(printed.getvalue(), end="")
    if arguments.keep:
        head = "$ python -m benchmarks.predicting.published"
        where = f"{date.today()}, nothing is timed, so it prints the same on any machine"
        (RESULTS / "predicting.published.txt").write_text(
            f"{head}\n{where}\n\n{printed.getvalue()}"
        )


def _print_all(arguments: argparse.Namespace) -> None:
    warnings.filterwarnings("ignore")
    print_constants()
    rows = [json.loads(line) for line in arguments.rows.read_text().splitlines() if line.strip()]
    made, refused = list[Comparison](), Counter[str]()
    for row in rows:
        if not row["id"].startswith(arguments.only):
            continue
        try:
            made.append(compared(row))
        except NotPredictedError as error:
            refused[str(error)] += 1
    print_table(made)
    print("* of what the allocator had reserved, which is more than a model takes")
    print("\nworst five of all:")
    for item in sorted(made, key=lambda item: -abs(item.error))[:5]:
        name = item.setting.row["id"]
        print(
            f"  {name}: {item.predicted:.2f} s, measured {item.measured:.2f} s ({item.error:+.0%})"
        )
    print(f"\n{sum(refused.values())} rows not predicted:")
    for why, count in refused.most_common():
        print(f"  {count:4d}  {why}")


if __name__ == "__main__":
    main()
