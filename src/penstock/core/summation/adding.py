"""Addition of plain numbers, with the bits that torch makes on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.summation.frames import ITEM_BYTES

Numbers = NDArray[Any]

BFLOAT16 = 3
_TYPES = ("<f4", "<f8", "<f2", "<u2")
assert len(_TYPES) == len(ITEM_BYTES)


def room_for(count: int, dtype: int) -> Numbers:
    """Memory for numbers of a type, given by its place in ``ITEM_BYTES``; bfloat16 as 16 bits."""
    return np.empty(count, _TYPES[dtype])


def bytes_of(numbers: Numbers) -> memoryview:
    """The memory of numbers that lie without gaps."""
    return numbers.view(np.uint8).data


def add_to(total: Numbers, more: Numbers, dtype: int) -> None:
    """Add numbers to others of the same type, in place."""
    if dtype != BFLOAT16:
        # What overflows is for whoever clips or scales to see, not for a server to warn of.
        with np.errstate(all="ignore"):
            np.add(total, more, out=total)
        return
    with np.errstate(all="ignore"):
        wide = _wide(total) + _wide(more)
    bits = wide.view(np.uint32)
    # To the nearest, and of two that are as near to the even one.
    rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
    total[:] = np.where(np.isnan(wide), 0x7FC0, rounded)


def _wide(numbers: Numbers) -> NDArray[np.float32]:
    return (numbers.astype(np.uint32) << 16).view(np.float32)
