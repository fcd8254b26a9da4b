"""How many examples a law is tried with that takes long for each."""

from __future__ import annotations

import os

from hypothesis import settings

TIMES = int(os.environ.get("PENSTOCK_EXAMPLES", "1"))


def examples(count: int) -> settings:
    """So many in ``make test``; in ``make soak``, ten times as many."""
    return settings(max_examples=count * TIMES, deadline=None)
