"""Random models, schedules and options train as a loop that anyone would write.

``make test`` draws thirty trainings anew each time, ``make soak`` some hundreds. A failure prints
the smallest case that still fails, and how to run just that one again.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from tests.oracles.cases import late_trainings, trainings
from tests.oracles.comparing import compare, compare_late, quietly

few = {"deadline": None, "suppress_health_check": list(HealthCheck)}
pytestmark = pytest.mark.timeout(900)  # a failure is shrunk for some minutes


@settings(max_examples=20, **few)
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
