"""How much of what could be tried is tried in ``make test``; the rest is for ``make soak``."""

from __future__ import annotations

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
