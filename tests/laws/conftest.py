"""The seed of random cases, which a failure tells."""

from __future__ import annotations

import os
from random import SystemRandom

import pytest


@pytest.fixture
def seed(request):
    """Of the first case; the others follow.

    New each time, but in CI, which judges a change and not its luck (as hypothesis has it, too).
    """
    given = os.environ.get("PENSTOCK_SEED", "2026" if os.environ.get("CI") else "")
    first = int(given) if given else SystemRandom().randrange(10**9)
    print(f"PENSTOCK_SEED={first}")
    return first
