"""The table of rivals and the sentence that says what decided."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from penstock import Link, plan
from penstock.planning.planner.why import _comparison
from penstock.planning.plans import Plan
from tests.kit.planning import KIB, attempt, chain, devices, in_one_line

HEAVY = chain(parameter_bytes=100 * KIB)
SLOW = replace(devices(2), link=Link(latency_seconds=0.001, bytes_per_second=200.0 * KIB))
LABELS = [
    "single device",
    "data parallel",
    "straight pipeline",
    "best synchronous",
    "best asynchronous",
]


def rows(found):
    return {one.label: one for one in found.alternatives}


def test_every_kind_of_plan_is_a_row_with_its_numbers():
    found = plan(HEAVY, SLOW, microbatches=8)
    assert [one.label for one in found.alternatives] == LABELS
    table = rows(found)
    single, parallel = table["single device"], table["data parallel"]
    assert single.step_seconds == found.one_device_seconds == pytest.approx(8 * 0.12)
    assert (single.bubble, single.moved_bytes, single.delay) == (0, 0, 0)
    # 400 KiB of gradients in a ring of two: as much again over the link of each, in two messages.
    exchange = 400 / 200 + 2 * 0.001
    assert parallel.step_seconds == pytest.approx(8 * 0.12 / 2 + exchange)
    assert parallel.moved_bytes == 2 * 400 * KIB
    assert parallel.bubble == pytest.approx(exchange / parallel.step_seconds)
    straight = table["straight pipeline"]
    assert straight.moved_bytes == 2 * 8 * 2 * KIB
    forced = plan(HEAVY, SLOW, microbatches=8, schedule="1f1b", stages=2)
    assert straight.step_seconds == forced.step_seconds
    assert straight.memory_bytes == max(forced.rank_bytes)
    assert straight.bubble == pytest.approx(forced.simulate().bubble)


def test_the_best_of_a_kind_is_what_is_planned_when_it_is_asked_for():
    table = rows(plan(HEAVY, SLOW, microbatches=8, schedule="gpipe"))
    assert table["best synchronous"].step_seconds == plan(HEAVY, SLOW, microbatches=8).step_seconds
    never = [
        attempt(HEAVY, SLOW, microbatches=8, schedule=name, replicas="any")
        for name in ("pipedream", "pipedream-2bw")
    ]
    fastest = min(one.step_seconds for one in never)
    assert table["best asynchronous"].step_seconds == pytest.approx(fastest, rel=0.01)
    assert table["best asynchronous"].delay >= 1


@pytest.mark.parametrize(
    "request_",
    [
        {},
        {"asynchronous": True},
        {"schedule": "pipedream"},
        {"schedule": "gpipe", "stages": 2},
        {"replicas": "2"},
        {"memory_bytes": 860 * KIB},
        {"stages": 1},
    ],
)
def test_exactly_the_plan_is_marked_as_chosen(request_):
    found = plan(HEAVY, SLOW, microbatches=8, **request_)
    chosen = [one for one in found.alternatives if one.remark == "chosen"]
    assert chosen
    for one in chosen:
        assert one.step_seconds == pytest.approx(found.step_seconds)
        assert one.memory_bytes == max(found.rank_bytes)
    new = [one for one in chosen if one.label == "this plan"]
    assert new == (chosen if found.alternatives[0].label == "this plan" else [])


def test_rows_that_could_not_be_chosen_say_why():
    table = rows(plan(HEAVY, SLOW, microbatches=8, memory_bytes=640 * KIB))
    assert table["best asynchronous"].remark == "old weights: not asked for"
    assert table["best synchronous"].remark == "chosen"
    # A single device needs at least its weights and their gradients.
    assert table["single device"].remark.startswith("does not fit: ")
    assert "over on rank 0 (d0)" in table["single device"].remark


def test_one_device_or_one_microbatch_leave_rivals_out():
    alone = rows(plan(chain(), devices(1), microbatches=8))
    assert set(alone) == {"single device", "best synchronous"}
    assert "data parallel" not in rows(plan(chain(), devices(2), microbatches=1))


def test_print_shows_the_table_and_the_file_keeps_it():
    found = plan(HEAVY, SLOW, microbatches=8)
    text = str(found)
    assert all(f" {label} " in text for label in LABELS)
    assert in_one_line(found).endswith(found.reason)
    assert Plan.from_json(found.to_json()).alternatives == found.alternatives


def test_the_sentence_names_what_decided():
    idle = plan(chain(), devices(2), microbatches=2, replicas="any", recompute="never")
    assert "data parallelism on 2 devices: 120 ms a step, 2.00× one device" in idle.reason
    assert "would take" in idle.reason
    slow = plan(HEAVY, replace(SLOW, link=Link(bytes_per_second=20.0 * KIB)), microbatches=1)
    assert slow.num_ranks == 1
    exchange = plan(
        chain(parameter_bytes=100 * KIB, output_bytes=0),
        SLOW,
        microbatches=8,
        recompute="never",
        replicas="2",
    )
    assert "but is not what was asked for" in exchange.reason
    fits = plan(chain(), devices(2), microbatches=8, memory_bytes=41 * KIB, recompute="never")
    assert "over the 41 KiB allowed" in fits.reason
    assert "data parallelism on 2 devices would take 480 ms, but needs 46 KiB" in fits.reason


@pytest.mark.parametrize("schedule", [None, "1f1b"])
def test_old_weights_are_never_proposed_unasked(schedule):
    # With one microbatch, only a pipeline that never drains has all devices busy.
    found = plan(chain(), devices(4), microbatches=1, schedule=schedule)
    assert not found.versions.asynchronous
    assert rows(found)["best asynchronous"].step_seconds < found.step_seconds / 2
    allowed = plan(chain(), devices(4), microbatches=1, asynchronous=True)
    assert allowed.versions.asynchronous
    assert allowed.step_seconds == pytest.approx(0.03)
    assert rows(allowed)["best asynchronous"].remark == "chosen"


def test_the_size_of_microbatches_is_chosen():
    small = replace(chain(seconds=0.0055), microbatch_size=1)
    both = replace(chain(), microbatch_size=2, other_sizes=(small,))
    # Twice as many small ones take longer, but so few large ones cannot fill two stages.
    found = plan(both, devices(2), minibatch=4, stages=2, schedule="1f1b")
    assert (found.microbatch_size, found.num_microbatches) == (1, 4)
    assert found.step_seconds == pytest.approx(5 * 2 * 0.0165)
    many = plan(both, devices(2), minibatch=64, stages=2, schedule="1f1b")
    assert (many.microbatch_size, many.num_microbatches) == (2, 32)
    given = plan(both, devices(2), minibatch=64, microbatches=64, stages=2, schedule="1f1b")
    assert (given.microbatch_size, given.num_microbatches) == (1, 64)
    odd = plan(both, devices(2), minibatch=5, stages=2)
    assert (odd.microbatch_size, odd.num_microbatches) == (1, 5)
    # Three stages of double-buffered weights need two microbatches.
    late = plan(both, devices(3), minibatch=2, schedule="pipedream-2bw", replicas=(1, 1, 1))
    assert (late.microbatch_size, late.num_microbatches) == (1, 2)


@dataclass(frozen=True)
class Rival:
    """What a comparison asks of a candidate."""

    seconds: float = 1.0
    peak: float = 2
    rank_bytes: tuple[int, ...] = (2048, 2048)
    ranks: int = 2
    bubble: float = 0.1
    reduce_seconds: float = 0.0
    again_seconds: float = 0.0

    def __str__(self):
        return "it"

    @property
    def setting(self):
        return SimpleNamespace(num_ranks=self.ranks, replicas_of=lambda index: 1)

    @property
    def prediction(self):
        return SimpleNamespace(bubble=self.bubble)

    @property
    def task(self):
        return SimpleNamespace(num_microbatches=4)

    @property
    def stages(self):
        again = "stage" if self.again_seconds else "none"
        return [
            SimpleNamespace(
                reduce_seconds=self.reduce_seconds,
                again_seconds=self.again_seconds,
                recompute=again,
            )
        ]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"seconds": 2.0}, "it would take 2 s"),
        ({"seconds": 2.0, "bubble": 0.5}, "it would take 2 s, with its devices idle 50% of the t"),
        (
            {"seconds": 2.0, "bubble": 0.5, "again_seconds": 0.1},
            "it would take 2 s, 400 ms of it to run forward twice",
        ),
        (
            {"seconds": 2.0, "reduce_seconds": 0.5, "again_seconds": 0.1},
            "it would take 2 s, 500 ms of it to exchange gradients",
        ),
        ({"peak": 3, "ranks": 3}, "it would take as long and hold 3 instead of 2 microbatches"),
        ({"rank_bytes": (4096, 2048), "ranks": 3}, "it would take as long and need 6 KiB in all"),
        ({"ranks": 3}, "it would take as long and need 3 devices"),
        ({"ranks": 2}, "it would take as long and is less simple"),
        ({"ranks": 1, "peak": 1, "rank_bytes": (1024,)}, "it would take as long and is less simp"),
    ],
)
def test_a_rival_is_told_by_what_it_has_more_of(fields, told):
    assert _comparison(Rival(), Rival(**fields)).startswith(told)
