"""Waiting for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable

_PAUSE_SECONDS = 0.01


def until(holds: Callable[[], object], seconds: float = 60.0) -> bool:
    """Whether it comes true, as soon as it does, or after so many seconds of looking.

    Seconds in which this process stands still do not count: others stand still, too.
    """
    for _ in range(round(seconds / _PAUSE_SECONDS)):
        if holds():
            return True
        time.sleep(_PAUSE_SECONDS)
    return bool(holds())
