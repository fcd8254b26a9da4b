"""Random models, schedules and options train as a loop that anyone would write.

``make test`` draws thirty trainings anew each time, ``make soak`` some hundreds. A failure prints
the smallest case that still fails, and how to run just that one again.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, example, given, settings

from tests.oracles.cases import Case, late_trainings, trainings
from tests.oracles.comparing import compare, compare_late, quietly

few = {"deadline": None, "suppress_health_check": list(HealthCheck)}
pytestmark = pytest.mark.timeout(900)  # a failure is shrunk for some minutes

RECURRENT_UNDER_AUTOCAST = Case(
    names=("gru", "gru"), tokens=True, double=False, schedule="zb-h1", num_ranks=2,
    num_microbatches=4, cuts=(1,), rows=(9, 2, 4), recompute="stage", optimizer="adamw",
    scheduler=False, clip_norm=10.0, scaler=True, autocast=True, accumulates=False, streams=True,
    post_validate=True,
)  # fmt: skip
"""Differed in every second run: ranks made each other forget what autocast had cast."""


@settings(max_examples=20, **few)
@example(RECURRENT_UNDER_AUTOCAST)
@given(trainings())
def test_synchronous_trainings_equal_a_plain_loop(case):
    quietly(compare, case)


@settings(max_examples=10, **few)
@given(late_trainings())
def test_asynchronous_trainings_equal_a_plain_replay(case):
    quietly(compare_late, case)


@pytest.mark.soak
@settings(max_examples=300, **few)
@given(trainings())
def test_many_synchronous_trainings_equal_a_plain_loop(case):
    quietly(compare, case)


@pytest.mark.soak
@settings(max_examples=100, **few)
@given(late_trainings())
def test_many_asynchronous_trainings_equal_a_plain_replay(case):
    quietly(compare_late, case)
