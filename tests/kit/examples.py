"""How much of what could be tried is tried in ``make test``; the rest is for ``make soak``."""

from __future__ import annotations

import itertools
import os

import pytest
from hypothesis import settings

TIMES = int(os.environ.get("PENSTOCK_EXAMPLES", "1"))


def examples(count: int) -> settings:
    """So many in ``make test``; in ``make soak``, ten times as many."""
    return settings(max_examples=count * TIMES, deadline=None)


def more(*case):
    """A case of a parametrized test that only ``make soak`` tries; quicker ones are beside it."""
    return pytest.param(*case, marks=pytest.mark.soak)


def crossed(names, *settings, thorough=()):
    """Every name with every combination of settings, for a parametrized test.

    In ``make test`` the names that are ``thorough`` meet all combinations; every other name meets
    one, the next name the next one; ``make soak`` tries the rest.
    """
    combinations = list(itertools.product(*settings))
    return [
        pytest.param(name, *combination)
        if name in thorough or turn == index % len(combinations)
        else more(name, *combination)
        for index, name in enumerate(names)
        for turn, combination in enumerate(combinations)
    ]


def in_turns(cases, every, always=()):
    """The cases of a parametrized test, of which ``make test`` tries one of so many.

    It also tries all whose first value is in ``always``; ``make soak`` tries the rest. For products
    of lists, ``every`` should have no divisor in common with their lengths: every value is met.
    """
    return [
        pytest.param(*case) if index % every == 0 or case[0] in always else more(*case)
        for index, case in enumerate(cases)
    ]
