"""Every benchmark can still be loaded: what it measures has not moved away from it."""

from __future__ import annotations

import importlib
from contextlib import ExitStack

import pytest

from benchmarks.common.goals import goals
from benchmarks.common.turns import Measured
from benchmarks.common.works import tiny_work
from benchmarks.contest.runtime import ALONE, HEADER, all_contestants, rows
from benchmarks.learning import asynchronous
from tests.kit.paths import ROOT

MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "benchmarks").rglob("*.py")
    if path.stem != "__init__"
)


@pytest.mark.parametrize("module", MODULES)
def test_a_benchmark_can_be_loaded(module):
    assert importlib.import_module(module).__doc__


def test_contestants_are_held_to_the_hand_written_ones():
    seconds = {
        ALONE: 1.0,
        "hand-written processes 1F1B": 0.5,
        "Penstock processes 1F1B": 0.625,
        "Penstock processes ZB-V": 0.6875,
        "torch 1F1B": 1.0,
    }
    measured = {name: Measured(own, 1.0 + own * (name != ALONE)) for name, own in seconds.items()}
    verdicts = {goal.wanted: (goal.found, goal.verdict) for goal in goals({("tiny", 4): measured})}
    title = "tiny, m = 4, Penstock processes"
    expected = {
        f"{title} 1F1B: speed ≥ 1.00 × hand-written processes 1F1B": ("0.80", "**missed**"),
        f"{title} 1F1B: speed ≥ 1.60 × torch 1F1B": ("1.60", "met"),
        f"{title} ZB-V: speed ≥ 0.85 × Penstock processes 1F1B": ("0.91", "met"),
        f"{title} 1F1B: CPU overhead ≤ 1.1 × hand-written processes 1F1B": (
            "156250 beside 125000 µs",
            "**missed**",
        ),
    }
    assert verdicts.items() >= expected.items()
    table = rows(tiny_work(4, rows=1, width=4), all_contestants(), measured)
    column = HEADER.index("÷ hand-written")
    assert {row[2]: row[column] for row in table} == {
        ALONE: "",
        "hand-written processes 1F1B": "1.00",
        "Penstock processes 1F1B": "0.80",
        "Penstock processes ZB-V": "",
        "torch 1F1B": "0.50",
    }


def test_contestants_without_a_flush_are_built_and_proven():
    """The list of contestants got a field more, of which this benchmark did not know."""
    work, everybody = tiny_work(4, rows=1, width=4), asynchronous.all_contestants()
    names = [ALONE, "Penstock threads 1F1B", "Penstock threads pipedream"]
    chosen = {name: everybody[name] for name in names}
    with ExitStack() as ends:
        found = asynchronous.enter(work, chosen, 0, 2, ends)
        for contest in found.values():
            contest.run()
    assert list(found) == names
