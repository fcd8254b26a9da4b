"""The page to choose a plan from: every plan is on it with its reason, and nothing is fetched."""

from __future__ import annotations

import re

import pytest

import penstock as pk
from penstock.base.errors import InputError, PlanError
from penstock.planning.planner import choices, objective, search
from penstock.planning.planner.judged import raced
from tests.kit.chromium import CHROMIUM
from tests.kit.command_line import refused, run
from tests.kit.planning import chain, devices
from tests.unit.drawing.test_page_widths import measured
from tests.unit.planner.test_objectives import hosts

MIB = 1 << 20
MODEL = chain(
    24,
    parameter_bytes=40 * MIB,
    activation_bytes=30 * MIB,
    optimizer_bytes=80 * MIB,
    update_seconds=0.002,
    output_bytes=MIB,
    input_shape="(1, 128) int64",
)
REQUEST = {"microbatches": 16, "price_per_hour": 2.0}


@pytest.fixture(scope="module")
def found():
    return choices(MODEL, hosts(2, 4, memory_bytes=2 << 30), **REQUEST)


@pytest.fixture(scope="module")
def page(found, tmp_path_factory):
    path = tmp_path_factory.mktemp("choice") / "plans.html"
    assert pk.draw(found, path) == path.read_text().rstrip("\n")
    return path.read_text()


def test_the_first_is_the_plan_and_the_others_say_why_they_are_not(found):
    assert found.plan == pk.plan(MODEL, hosts(2, 4, memory_bytes=2 << 30), **REQUEST)
    labels = [option.label for option in found.options]
    assert {"chosen", "data parallel", "single device", "best asynchronous"} <= {*labels}
    assert {"on 4 devices", "on 2 devices"} <= {*labels}
    verdicts = {option.label: option.verdict for option in found.options}
    assert verdicts["data parallel"].startswith("does not fit, ")
    assert "more to sum gradients" in verdicts["data parallel"]
    assert "more idle" in verdicts["straight pipeline"]
    assert "4 devices instead of 8" in verdicts["on 4 devices"]
    assert verdicts["best asynchronous"].startswith("learns from old weights, which was not asked")
    for option in found.options:
        assert option.is_possible == (max(option.plan.rank_bytes) <= 2 << 30) or (
            option.label == "best asynchronous" and not option.is_possible
        )


@pytest.fixture
def sizes(monkeypatch):
    """Of the clusters that are raced on."""
    seen = []

    def spied(tasks, *others):
        seen.append(len(tasks[0].cluster.devices))
        return raced(tasks, *others)

    monkeypatch.setattr(objective, "raced", spied)
    monkeypatch.setattr(search, "raced", spied)
    return seen


@pytest.mark.parametrize("wanted", [{}, {"objective": "devices"}, {"objective": "cost"}])
def test_no_part_of_the_cluster_is_planned_twice(wanted, sizes):
    cluster = devices(4)
    several = choices(chain(8), cluster, microbatches=4, **wanted)
    assert sizes.count(4) == 1
    assert len(sizes) == len({*sizes}) or wanted == {"objective": "cost"}  # what was too dear
    assert several.plan == pk.plan(chain(8), cluster, microbatches=4, **wanted)


@pytest.mark.parametrize("wanted", [{}, {"objective": "devices"}, {"objective": "cost"}])
def test_where_nothing_fits_no_part_is_planned_twice_either(wanted, sizes):
    """All devices were: to see what there is to choose from, and to say what is missing."""
    short, graph = devices(2, memory_bytes=15_000), chain(4, parameter_bytes=1000)
    request = {"microbatches": 4, "spill": "never", **wanted}
    with pytest.raises(PlanError, match="no plan fits in memory; the closest") as first:
        choices(graph, short, **request)
    assert sizes.count(2) == 1
    assert len(sizes) == len({*sizes})
    with pytest.raises(PlanError) as other:
        pk.plan(graph, short, **request)
    assert str(first.value) == str(other.value)


@pytest.mark.parametrize("measure", ["memory", "devices", "cost"])
def test_nothing_beats_what_is_efficient(found, measure):
    def taken(option):
        plan = option.plan
        amount = {
            "memory": option.memory_bytes,
            "devices": plan.num_seats,
            "cost": option.spending.amount,
        }
        return plan.step_seconds, amount[measure]

    efficient = found.efficient(measure)
    assert efficient
    possible = [option for option in found.options if option.is_possible]
    for option in possible:
        beaten = any(
            other is not option
            and all(a <= b for a, b in zip(taken(other), taken(option), strict=True))
            for other in possible
        )
        assert beaten != (option in efficient)


def test_every_plan_is_on_the_page_with_its_step_memory_and_reason(found, page):
    sections = re.findall(
        r'<section class="card option" id="plan-(\d+)">(.*?)</section>', page, re.S
    )
    assert [int(number) for number, _ in sections] == [*range(1, len(found.options) + 1)]
    for (_, section), option in zip(sections, found.options, strict=True):
        words = re.sub(r"<[^>]*>", "", section)
        assert option.verdict in words.replace("&#x27;", "'").replace("&gt;", ">")
        assert "Memory at its peak" in section and 'class="stack"' in section
        assert section.count('class="timeline"') == 1
    for name in ("memory", "devices", "cost"):
        (panel,) = re.findall(rf'<div class="tab tab-{name}">(.*?</svg></div>)</div>', page, re.S)
        wide = panel.partition('class="narrow"')[0]
        assert {*re.findall(r'href="#plan-(\d+)"', wide)} == {
            str(number) for number in range(1, len(found.options) + 1)
        }
        assert wide.count('class="front"') == (len(found.efficient(name)) > 1)


def test_the_page_needs_no_network(page):
    assert "default-src 'none'" in page
    assert not re.search(r'(src|href)="(?!#)', page)
    assert not re.search(r"url\((?!#)|@import|https?://", page)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome")
def test_nothing_is_clipped_on_a_laptop_and_on_a_phone(page, tmp_path):
    for seen in measured([page], tmp_path):
        assert seen["needs"] <= seen["width"], seen
        assert not seen["clipped"], seen


def test_the_command_line_writes_page_and_plan(tmp_path):
    chain(6).save(tmp_path / "g.json")
    words = ("plan", str(tmp_path / "g.json"), "-p", "2", "-m", "4")
    run(*words, "--html", str(tmp_path / "p.html"), "-o", str(tmp_path / "p.json"))
    assert "plans to choose from" in (tmp_path / "p.html").read_text()
    assert pk.Plan.load(tmp_path / "p.json") == pk.plan(
        chain(6), pk.Cluster.local(2), microbatches=4
    )
    assert "leave --what-if out" in refused(*words, "--html", "p.html", "--what-if", "speed*2")
    assert "end the name in .html" in refused(*words, "--html", str(tmp_path / "p.pdf"))


def test_what_cannot_be_chosen_from():
    with pytest.raises(InputError, match="stand alone"):
        choices(chain(4), devices(2), rate=2.0)
    with pytest.raises(PlanError, match="no plan fits in memory"):
        choices(chain(4), devices(2, memory_bytes=1000), microbatches=4)
    with pytest.raises(InputError, match="make a page; give its name"):
        pk.draw(choices(chain(4), devices(2), microbatches=4))


def test_stages_that_come_and_go_may_be_the_only_plan(tmp_path):
    """Where nothing else fits, the page has the chosen plan, and what would need more memory."""
    cluster = devices(2, memory_bytes=115_000)
    tier = pk.Tier(kind="host", read_bytes_per_second=1e6, write_bytes_per_second=1e6)
    cluster = pk.Cluster(devices=cluster.devices, tiers=(tier,))
    only = choices(chain(8, parameter_bytes=20_000), cluster, microbatches=4)
    assert only.plan.spill is not None
    assert only.options[0].label == "chosen"
    assert "1 plans" not in pk.draw(only, tmp_path / "p.html")
