"""Things that take long to make, made once: every caller gets a copy of its own."""

from __future__ import annotations

import copy
import functools


def made_once(make):
    """``make``, which is asked once for the same arguments; a copy is never shared.

    A model takes seconds to capture, and milliseconds to copy with all that it was captured as.
    """
    kept = functools.cache(make)

    @functools.wraps(make)
    def copied(*arguments):
        return copy.deepcopy(kept(*arguments))

    return copied
