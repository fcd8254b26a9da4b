"""The loop at the heart of the runtime: order, records, what an error becomes, and what a rank says
of itself."""

from __future__ import annotations

import time

import pytest

from penstock.base.errors import PeerError, StageError
from penstock.core.schedule import Op
from penstock.engine.run.rank.interpreter import NUM_SHOWN, Journal, Restart, perform_all

OPS = [Op.parse(text) for text in ("0F0", "0F1", "0B0", "0B1")]


class Step:
    """Notes its op in a list; or raises."""

    def __init__(self, op, error=None):
        self.op = op
        self.error = error

    def perform(self, work):
        if self.error is not None:
            raise self.error
        work.append(self.op)


def steps(error=None, at=None):
    """Steps of which the one with an op may raise."""
    return [Step(op, error if str(op) == at else None) for op in OPS]


def test_steps_are_performed_in_order_and_recorded():
    done, journal = [], Journal(OPS)
    perform_all(iter(steps()), done, journal)
    assert journal.current is None
    assert done == OPS
    times = [time for pair in zip(journal.starts, journal.ends, strict=True) for time in pair]
    assert len(times) == 2 * len(OPS)
    assert times == sorted(times)


def test_an_error_names_stage_microbatch_and_op_and_keeps_the_original():
    original = ValueError("boom")
    done, journal = [], Journal(OPS)
    with pytest.raises(
        StageError, match=r"^stage 0, microbatch 1, op 0B1: ValueError: boom\n  at .*in perform"
    ) as caught:
        perform_all(steps(original, at="0B1"), done, journal)
    assert caught.value.__cause__ is original
    assert done == OPS[:3]
    assert journal.current == OPS[3]  # for whoever asks what the rank did last


@pytest.mark.parametrize("error", [PeerError("gone", "gone"), KeyboardInterrupt(), Restart()])
def test_what_is_no_error_of_the_stage_passes_as_it_is(error):
    done = []
    with pytest.raises(type(error)) as caught:
        perform_all(steps(error, at="0F1"), done, Journal())
    assert caught.value is error
    assert done == OPS[:1]


def ops(count):
    return [Op.parse(f"0F{k}") for k in range(count)]


def test_a_rank_that_has_done_nothing_says_so():
    assert Journal().text(2) == "rank 2: did nothing; idle"


def test_only_the_last_ops_are_told_in_their_order():
    done = ops(NUM_SHOWN + 3)
    journal = Journal([*done, Op.parse("0B0")])
    journal.starts.extend([0.0] * len(done))
    journal.ends.extend([1.0] * len(done))
    shown = " ".join(f"0F{k}" for k in range(3, NUM_SHOWN + 3))
    assert journal.text(0) == f"rank 0: did {shown}; idle"


def test_the_current_op_is_told_with_its_age_and_what_it_waits_for():
    receive = Op.parse("1RECV_F0")
    waiting = {receive: "rank 1, waiting at 1RECV_F0 for 0SEND_F0 of rank 0"}
    journal = Journal([receive, Op.parse("1F0")], waiting)
    assert journal.current is None
    journal.starts.append(time.perf_counter() - 2)
    assert journal.current == receive
    text = journal.text(1)
    assert text.startswith("rank 1: did nothing; at 1RECV_F0 for 2")
    assert text.endswith(" s (rank 1, waiting at 1RECV_F0 for 0SEND_F0 of rank 0)")
    journal.end()
    assert "waiting" not in journal.text(1)
