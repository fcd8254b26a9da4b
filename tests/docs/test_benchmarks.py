"""Every benchmark can still be loaded: what it measures has not moved away from it."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from contextlib import ExitStack

import pytest

from benchmarks.common import alone, page
from benchmarks.common.alone import Loaded, Surroundings, Usage, measured_alone, share_of_others
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


WITHOUT_TIMES = {
    "benchmarks.learning.convergence",  # losses, which no other program changes
    "benchmarks.streaming.compare",
    "benchmarks.planning.learned_placement",
    "benchmarks.planning.zero_bubble_table",
    "benchmarks.planning.startup_job",  # a part of benchmarks.planning.startup
    "benchmarks.network.shaped_network",  # a tool
    "benchmarks.predicting.published",  # times of others
    "benchmarks.predicting.published_ranks",  # likewise
    "benchmarks.common.page",  # writes what others have measured
}


@pytest.mark.parametrize("module", MODULES)
def test_a_benchmark_can_be_loaded(module):
    assert importlib.import_module(module).__doc__


@pytest.mark.parametrize("module", sorted(set(MODULES) - WITHOUT_TIMES))
def test_a_benchmark_of_times_keeps_no_figure_of_a_loaded_machine(module):
    source = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")
    if 'if __name__ == "__main__":' in source:
        assert "publish(" in source.rpartition('if __name__ == "__main__":')[2]


def test_others_are_who_is_not_of_the_tree_of_processes():
    before = Usage(everybody=100.0, own=40.0, clock=0.0)
    after = Usage(everybody=100.0 + 6.0, own=40.0 + 5.0, clock=1.0)
    assert share_of_others(before, after) == pytest.approx(1.0 / (os.cpu_count() or 1))
    assert share_of_others(before, before._replace(own=41.0, clock=1.0)) == 0.0


def test_children_that_ended_belong_to_the_tree():
    before = Usage.now(os.getpid())
    subprocess.run([sys.executable, "-c", "sum(range(10**7))"], check=True)
    after = Usage.now(os.getpid())
    assert after.own > before.own
    assert after.everybody - before.everybody >= 0.9 * (after.own - before.own) - 0.1


def test_nothing_is_measured_while_another_program_computes():
    a_tenth = 1 + (os.cpu_count() or 1) // 10
    asleep = subprocess.Popen(["sleep", "60"])
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(a_tenth)]
    try:
        with pytest.raises(Loaded, match="--loaded looks"):
            measured_alone(lambda: pytest.fail("it was measured"), asleep.pid, look_seconds=1.0)
    finally:
        for process in (asleep, *busy):
            process.kill()
            process.wait()


def test_figures_are_kept_with_machine_date_and_load(tmp_path, monkeypatch):
    monkeypatch.setattr(alone, "RESULTS", tmp_path)
    surroundings = Surroundings(0.25, 1.5, others=0.012, minutes=3.0, date="2026-11-23")
    text = alone.store("contest.memory", "python -m it", "| a | b |", surroundings).read_text()
    assert text.startswith(f"$ python -m it\n2026-11-23, {os.cpu_count()} cores of ")
    assert "load 0.2 before and 1.5 after, other programs used 1.2% of the cores" in text
    assert text.endswith(" minutes\n\n| a | b |\n")
    assert surroundings.alone and not Surroundings(0, 0, others=0.06, minutes=1).alone


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


def test_the_page_is_written_from_the_kept_figures():
    """``python -m benchmarks.common.page`` writes it."""
    assert page.PAGE.read_text(encoding="utf-8") == page.page(page.CLAIMS.read_text("utf-8"))


def test_a_kept_table_stays_one_and_all_else_is_as_in_the_terminal():
    head = ["$ python -m x", "2026-01-01, 2 cores", ""]
    above = ["```console", "$ python -m x", "```", "", "*2026-01-01, 2 cores*", ""]
    boxed = ["┏━━━┓", "┃ a ┃", "┡━━━┩", "│ 1 │", "│ 2 │", "└───┘"]
    table = ["| a |", "|---|", "| 1 |", "| 2 |", ""]
    kept = [*head, "before", "", *boxed, "", "2 behind"]
    before, behind = ["```text", "before", "```", ""], ["```text", "2 behind", "```", ""]
    assert list(page.shown(kept)) == [*above, *before, *table, *behind]
    assert list(page.shown([*head, "before", *table])) == [*above, *before, *table]
    assert list(page.shown(kept, "2")) == [*above, "| a |", "|---|", "| 2 |", "", *behind]


def test_a_claim_without_figures_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"never\.measured"):
        page.page("# A claim\n\n{{ never.measured }}\n", tmp_path)
