"""Why a step parted from its prediction, as a person reads it."""

from __future__ import annotations

import pytest

from penstock import Op, Span
from penstock.core.timing import Cause, Parting
from penstock.drawing.report import reason

F, B = Op.parse("1F3"), Op.parse("1B2")


def parting(cause, late=0.004):
    return Parting(Span(F, 1, 0.010, 0.012), Span(F, 1, 0.010 + late, 0.012 + late), cause)


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (Cause("op", F, 1, None, 1, 0.002, 0.003), "it took 3 ms instead of 2 ms"),
        (
            Cause("begin", F, 1, None, 1, 0, 0.003),
            "it began the rank's work at 3 ms instead of 0 s",
        ),
        (
            Cause("op", B, 1, None, 1, 0.002, 0.005),
            "it started at 14 ms instead of 10 ms, because 1B2 on rank 1 took 5 ms instead of 2 ms",
        ),
        (
            Cause("pause", F, 1, Op.parse("0F3"), 0, 0.001, 0.002),
            "it started at 14 ms instead of 10 ms, for several reasons, the largest that 1F3 on "
            "rank 1 followed 0F3 of rank 0 after 2 ms instead of 1 ms",
        ),
        (
            Cause("pause", F, 1, B, 1, 0.0, 0.004),
            "it started at 14 ms instead of 10 ms, because 1F3 on rank 1 followed 1B2 after 4 ms "
            "instead of 0 s",
        ),
    ],
)
def test_the_cause_is_told_in_one_sentence(cause, words):
    assert reason(parting(cause)).replace("\N{NO-BREAK SPACE}", " ") == words
