"""The figures of the page that chooses are what comes out, and those of the contest what was
measured."""

from __future__ import annotations

import re

import pytest

from penstock import schedules
from penstock.cli.sources import load_shown
from penstock.core.timing.costs import Costs
from penstock.core.timing.simulator import simulate
from penstock.core.versions import POLICIES, USUAL
from penstock.planning.plans.explanation import stability_bound
from tests.docs.pages import blocks_of
from tests.kit.paths import DOCS, ROOT

PAGE = (DOCS / "choosing.md").read_text(encoding="utf-8")
CONTEST = (DOCS / "contest.md").read_text(encoding="utf-8")
MEASURED = (ROOT / "benchmarks/results/contest.methods.txt").read_text(encoding="utf-8")
COSTS = (Costs(), Costs(hop=0.5), Costs(2, 1, 1))
"""In the order of the columns."""


def table(text, header):
    """The cells of each row of the table whose header begins so."""
    lines = text[text.index(f"\n{header}") + 1 :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def percent(share):
    return f"{100 * share:.1f}"


def bubble(name, num_ranks, num_microbatches):
    return load_shown(name, num_ranks, num_microbatches, Costs()).timeline.bubble


SCHEDULES = {row[1].strip("`"): row[2:] for row in table(PAGE, "| if | take |")}


@pytest.mark.parametrize("name", sorted({*SCHEDULES} - {"optimal"}))
def test_schedules_have_these_bubbles(name):
    *shown, peak = SCHEDULES[name]
    plain = load_shown(name, 8, 32, Costs())
    per_rank = plain.schedule.num_stages / plain.schedule.num_ranks
    timelines = [
        load_shown(name, 8, 32, costs).timeline
        if name == "zb-auto"  # whose order depends on the costs
        else simulate(plain.schedule, costs.spread(per_rank))
        for costs in COSTS
    ]
    assert shown == [percent(timeline.bubble) for timeline in timelines]
    assert peak == f"{max(plain.timeline.peak_activations):.4g}"


def test_schedules_and_policies_are_ours():
    assert {*SCHEDULES} <= {*schedules.names()} - {*USUAL}
    links = [row[0] for row in table(PAGE, "| policy |")]
    assert {re.match(r"\[(.+?)\]", link)[1] for link in links} == {*POLICIES}


def test_a_flush_costs_so_much():
    for times, row in zip((1, 2, 4, 8), table(PAGE, "|  | p = 4 |"), strict=True):
        for p, cell in zip((4, 8, 16), row[1:], strict=True):
            costs = (percent(bubble(name, p, times * p)) for name in ("1f1b", "zb-h1"))
            assert cell == ", ".join(costs)
    assert all(1 / (1 - bubble("1f1b", p, 4 * p)) < 1.25 for p in (2, 4, 8, 16, 64))
    assert all(bubble("1f1b", p, 8 * p) < 0.12 for p in (2, 4, 8, 16, 64))


def test_delays_have_these_bounds():
    (row,) = table(PAGE, "| τ |")
    delays = re.search(r"^\| τ \| (.*) \|$", PAGE, re.M)[1].split(" | ")
    assert row[1:] == [f"{stability_bound(int(delay)):.3g}" for delay in delays]


def test_the_planner_answers_as_shown(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    blocks = {block.language: block.text for block in blocks_of("docs/choosing.md")}
    exec(blocks["python"], {})
    assert capsys.readouterr().out == blocks["text"]


def numbers(text):
    """All numbers, also in MiB and s where they are in KiB and ms."""
    found = re.findall(r"(?<![\w.-])(\d[\d.]*)(?: (KiB|ms))?", text)
    units = {"KiB": 1024, "ms": 1000}
    return {float(one) for one, _ in found} | {
        float(one) / units[unit] for one, unit in found if unit
    }


def test_the_contest_was_measured_so():
    rows = table(CONTEST, "| method |")
    lines = [line for line in MEASURED.splitlines() if "  " in line]
    for name, *cells in rows:
        measured = [line for line in lines if re.split(r" {2,}", line)[0] == name]
        assert len(measured) == 2, name
        assert numbers(" | ".join(cells)) <= numbers("  ".join(measured)), name
    titles = {re.split(r" {2,}", line)[0] for line in lines} - {"method"}
    assert titles == {name for name, *_ in rows}
