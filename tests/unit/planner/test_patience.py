"""A search that ends early has the best plan so far, and says how near to the best that is."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

import pytest
from msgspec.structs import replace

from penstock import Cluster, Device, LayerGraph, Link, plan
from penstock.base.errors import InputError, PlanError
from penstock.planning.planner import choices, race, what_if
from penstock.planning.planner.objective import PartsOfCluster
from penstock.planning.planner.patience import PlanningPatience
from penstock.planning.planner.why import CUT_SHORT
from tests.kit.launch import ENVIRONMENT
from tests.kit.planning import chain, devices

# Who wakes a search may meet a callback of the interpreter's, which nothing can leave.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

GRAPH = chain(12, parameter_bytes=1000)

PROFILED = """
import cProfile, sys
from penstock.planning.planner.patience import PlanningPatience

def search():
    while True:
        try:
            turns()
        except BaseException:
            if sys.argv[1] == "heard":
                raise
            break

def turns():
    for _ in range(1_000_000):
        pass

patience = PlanningPatience(0.0, print)
assert not patience.spend(search, lambda: True) or sys.argv[1] == "swallowed"
with cProfile.Profile():
    turns()
"""


def test_ctrl_c_gives_the_best_so_far(monkeypatch):
    enter, entered = race.Race._enter, []

    def interrupted(self, candidate):
        if len(entered) == 2 and not self.is_sketch:
            raise KeyboardInterrupt
        entered.append(candidate)
        enter(self, candidate)

    cluster = replace(devices(4), link=Link(latency_seconds=0.02))
    best = plan(GRAPH, cluster, microbatches=4)
    monkeypatch.setattr(race.Race, "_enter", interrupted)
    early = plan(GRAPH, cluster, microbatches=4)
    assert "(stopped when interrupted, at most " in early.reason
    bound = float(early.reason.split("at most ")[1].split("%")[0]) / 100
    assert best.step_seconds <= early.step_seconds <= (1 + bound + 0.01) * best.step_seconds


@pytest.fixture
def endless(monkeypatch):
    """Whatever is entered behind the first candidate that fits takes for ever."""
    enter = race.Race._enter

    def entered(self, candidate):
        while self.contenders:
            sum(range(100))
        enter(self, candidate)

    monkeypatch.setattr(race.Race, "_enter", entered)


def test_patience_ends_inside_of_what_takes_long_in_any_thread(endless):
    request = {"microbatches": 4, "patience_seconds": 0.1}
    assert "(stopped after 100 ms" in plan(GRAPH, devices(4), **request).reason
    with ThreadPoolExecutor(1) as other:
        early = other.submit(plan, GRAPH, devices(4), **request).result(timeout=300)
    assert "(stopped after 100 ms" in early.reason


def test_who_ends_in_time_is_not_woken_later(monkeypatch):
    monkeypatch.setattr("penstock.planning.planner.patience._LOOKS_SECONDS", 1e-4)
    for _ in range(50):
        patience, ended = PlanningPatience(1e-9), monotonic() + 1e-3
        patience.spend(lambda ended=ended: [monotonic() < ended] * 100, lambda: True)
        while monotonic() < ended:
            sum(range(100))
        assert patience.is_over


def test_without_an_answer_the_search_goes_on_and_ctrl_c_is_ctrl_c(monkeypatch):
    monkeypatch.setattr("penstock.planning.planner.patience._LOOKS_SECONDS", 1e-4)
    answers = []

    def search():
        began = monotonic()
        while monotonic() < began + 0.05:
            sum(range(100))
        answers.append("late")

    PlanningPatience(1e-9).spend(search, lambda: bool(answers))
    assert answers == ["late"]

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        PlanningPatience().spend(interrupted, lambda: False)


def test_an_explanation_takes_no_longer_than_the_answer(monkeypatch):
    monkeypatch.setattr("penstock.planning.planner.patience._LEAST_SECONDS", 0.0)
    monkeypatch.setattr("penstock.planning.planner.patience._MOMENT_SECONDS", 0.0)
    early = plan(GRAPH, devices(4), microbatches=4, patience_seconds=1e-9)
    assert "single device" in [row.label for row in early.alternatives]
    assert PlanningPatience(1e-9).as_long_again.is_over


@pytest.mark.parametrize(
    ("memory_bytes", "verdict"),
    [
        (28_431, r"no plan that fits was found in .*, in which \d+ schedules on some devices were"),
        (10_000, "no plan fits in memory: at least 192 B are missing on some device, whatever the"),
    ],
)
def test_where_nothing_fits_the_search_ends_and_claims_no_more_than_it_knows(
    monkeypatch, memory_bytes, verdict
):
    candidates, tried = race.candidates, []

    def endless(*args, **options):
        tried.append(options)
        while len(tried) > (16 if "slack" in options else 8):
            sum(range(100))
        return candidates(*args, **options)

    monkeypatch.setattr(race, "candidates", endless)
    request = {"microbatches": 4, "memory_bytes": memory_bytes, "spill": "never"}
    with pytest.raises(PlanError, match=f"{verdict}.*; the closest, .* more time"):
        plan(GRAPH, devices(4), patience_seconds=0.5, **request)


def test_ctrl_c_before_there_is_a_plan_is_ctrl_c(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(race.Race, "_enter", interrupted)
    with pytest.raises(KeyboardInterrupt):
        plan(GRAPH, devices(2), microbatches=4)


@pytest.fixture
def interrupting(monkeypatch):
    """A function after which somebody presses Ctrl-C once, behind so many more candidates than the
    first."""
    enter, left = race.Race._enter, [-1]

    def entered(self, candidate):
        counts = bool(self.contenders) and not self.is_sketch  # else there is nothing to show
        left[0] -= counts
        if counts and not left[0]:
            left[0] = -1
            raise KeyboardInterrupt
        enter(self, candidate)

    monkeypatch.setattr(race.Race, "_enter", entered)
    return lambda count: left.__setitem__(0, count)


def test_a_what_if_compares_like_efforts_and_says_what_was_cut_short(interrupting):
    whole = what_if("devices-1", GRAPH, devices(4), microbatches=4)
    assert whole.ends == ("", "") and "search" not in str(whole)
    interrupting(1)
    cut = what_if("devices-1", GRAPH, devices(4), microbatches=4)
    assert cut.ends[0] == "when interrupted"
    assert cut.rows()[-1][:2] == ("search", "stopped when interrupted")
    assert cut.before.step_seconds >= whole.before.step_seconds
    given = PlanningPatience(5.0)
    assert given.for_comparison._seconds == 5.0
    with pytest.raises(KeyboardInterrupt):
        given.spend(_interrupt, lambda: False)
    given.spend(_interrupt, lambda: True)
    assert given.end == "when interrupted" and given.for_comparison._seconds < 5.0


def _interrupt():
    raise KeyboardInterrupt


def test_the_page_of_choices_has_what_was_found_when_interrupted(monkeypatch):
    best = PartsOfCluster.best

    def interrupted(self, part, limit):
        if part.size < 4:
            raise KeyboardInterrupt
        return best(self, part, limit)

    everything = choices(GRAPH, devices(4), microbatches=4).options
    monkeypatch.setattr(PartsOfCluster, "best", interrupted)
    chosen, *others = choices(GRAPH, devices(4), microbatches=4).options
    assert chosen.plan == everything[0].plan
    assert "there was no time to look at all" in chosen.verdict
    assert 0 < len(others) < len(everything) - 1


def test_the_time_of_several_searches_is_divided_and_an_interrupt_ends_all():
    patience = PlanningPatience(4.0)
    first, second = patience.divided(2)
    assert first._seconds < 2.0 + 1e-6 and second._seconds < 4.0 and not second.is_over
    first.spend(_interrupt, lambda: True)
    assert second.is_over and patience.is_over and patience.end == "when interrupted"


def test_with_no_patience_there_is_a_plan_all_the_same():
    early = plan(GRAPH, devices(4), microbatches=4, patience_seconds=1e-9)
    patient = plan(GRAPH, devices(4), microbatches=4, patience_seconds=1000)
    assert "(stopped after " in early.reason
    assert "stopped" not in patient.reason
    assert patient.step_seconds <= early.step_seconds * (1 + race.SAME)


@pytest.mark.parametrize("count", [2, 4])
def test_of_what_was_seen_the_fastest_is_answered(count):
    """One device was faster, and "not what was asked for"."""
    cluster = replace(devices(count), link=Link(latency_seconds=1.0))
    early = plan(GRAPH, cluster, microbatches=4, patience_seconds=1e-9)
    rows = {row.label: row for row in early.alternatives}
    assert early.num_ranks == 1
    assert "not what was asked for" not in early.reason and "(stopped after" in early.reason
    assert rows["single device"].remark == "chosen"
    assert rows["best synchronous"].remark == CUT_SHORT
    pinned = plan(GRAPH, cluster, microbatches=4, patience_seconds=1e-9, stages=2)
    assert len(pinned.stages) == 2


@pytest.mark.parametrize("seconds", [0, -1, "5", float("nan")])
def test_patience_is_a_number_of_seconds(seconds):
    with pytest.raises(InputError, match="patience_seconds"):
        plan(GRAPH, devices(2), microbatches=4, patience_seconds=seconds)


def test_each_better_plan_is_told_of_with_its_distance_from_the_bound():
    lines = []
    PlanningPatience(tell=lines.append).note(1.04, 1.0)
    assert lines == ["1.04 s a step, at most 4% from the best"]


@pytest.mark.parametrize("request_", [{"asynchronous": True}, {"schedule": "pipedream"}])
def test_sharded_sums_of_what_never_drains_are_refused(request_):
    with pytest.raises(InputError, match=r"'sharded' .*take another reducer, or leave out"):
        plan(GRAPH, devices(2), microbatches=4, reducer="sharded", **request_)


@pytest.mark.parametrize("replicas", ["2-2", "any"])
def test_the_order_in_which_devices_are_listed_does_not_decide(replicas):
    link = Link(bytes_per_second=1e9)
    steps = set()
    for speeds in ((1, 1, 0.5, 0.5), (1, 0.5, 1, 0.5), (0.5, 1, 1, 0.5), (0.5, 0.5, 1, 1)):
        listed = tuple(Device(name=f"d{n}", speed=speed) for n, speed in enumerate(speeds))
        cluster = Cluster(devices=listed, link=link)
        steps.add(round(plan(GRAPH, cluster, microbatches=8, replicas=replicas).step_seconds, 9))
    assert max(steps) <= min(steps) * (1 + race.SAME)


def test_a_large_memory_is_found_wherever_it_is_listed():
    heavy = LayerGraph(
        layers=tuple(
            replace(layer, parameter_bytes=size)
            for layer, size in zip(chain(3).layers, (10_000, 1000, 1000), strict=True)
        )
    )
    for place in range(3):
        roomy = tuple(
            Device(name=f"d{n}", memory_bytes=200_000 if n == place else 24_000) for n in range(3)
        )
        cluster = Cluster(devices=roomy)
        assert plan(heavy, cluster, microbatches=2, replicas=(1, 1)).num_ranks == 2


@pytest.mark.parametrize("end", ["heard", "swallowed"])
def test_who_was_woken_can_be_profiled(end):
    """Python 3.11 never got past the first instruction of a function that was profiled."""
    done = subprocess.run(
        [sys.executable, "-c", PROFILED, end],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
