"""The loop at the heart of the runtime: order, records, and what an error becomes."""

from __future__ import annotations

import pytest

from penstock.errors import PeerError, StageError
from penstock.run.rank.interpreter import Restart, perform_all
from penstock.run.rank.journal import Journal
from penstock.schedule import Op

OPS = [Op.parse(text) for text in ("0F0", "0F1", "0B0", "0B1")]


class Performer:
    """Notes what it is asked; raises at one op."""

    def __init__(self, error=None, at=None):
        self.done = []
        self.error = error
        self.at = at

    def perform(self, op):
        if str(op) == self.at:
            raise self.error
        self.done.append(op)


def test_ops_are_performed_in_order_and_recorded():
    performer = Performer()
    journal = Journal()
    perform_all(iter(OPS), performer, journal)
    records = journal.records
    assert journal.current is None
    assert performer.done == [record.op for record in records] == OPS
    times = [time for record in records for time in (record.start, record.end)]
    assert times == sorted(times)


def test_an_error_names_stage_microbatch_and_op_and_keeps_the_original():
    original = ValueError("boom")
    performer = Performer(original, at="0B1")
    with pytest.raises(
        StageError, match=r"^stage 0, microbatch 1, op 0B1: ValueError: boom$"
    ) as caught:
        perform_all(OPS, performer, journal := Journal())
    assert caught.value.__cause__ is original
    assert performer.done == OPS[:3]
    assert journal.current == OPS[3]  # for whoever asks what the rank did last


@pytest.mark.parametrize("error", [PeerError("gone", "gone"), KeyboardInterrupt(), Restart()])
def test_what_is_no_error_of_the_stage_passes_as_it_is(error):
    performer = Performer(error, at="0F1")
    with pytest.raises(type(error)) as caught:
        perform_all(OPS, performer, Journal())
    assert caught.value is error
    assert performer.done == OPS[:1]
