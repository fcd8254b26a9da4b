"""``Exchange``: how long the copies of a stage take to sum their gradients, part by part.

Gradients leave in parts. Each part passes the same things one after another (a link, whoever adds,
the link of a host, …), and each of these works on one part at a time, in the order of the parts. In
a workshop this is a flow shop: were all P parts there at the beginning, the last one would be
through after Σ tₖ + (P − 1) · max tₖ, where part by part tₖ is what the k-th thing takes. But
parts are made one after another, by the last backward, so most of them pass while it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.base.errors import InputError
from penstock.base.values import amount, whole


class Exchange(NamedTuple):
    """What a stage's copies exchange before an update.

    Attributes:
        num_parts: of equal size.
        seconds: of one part on each thing that it passes, in order; at least one.
        once: seconds that come once besides, behind the last part: latencies.
    """

    num_parts: int
    seconds: tuple[float, ...]
    once: float = 0.0

    def checked(self, whose: str) -> Exchange:
        """This exchange with plain numbers.

        Raises:
            InputError: there is no part, nothing that parts pass, or a time is none.
        """
        count = whole(f"{whose}: num_parts", self.num_parts, 1)
        if not self.seconds:
            raise InputError(f"{whose}: seconds is empty; give one number per thing that is passed")
        seconds = tuple(amount(f"{whose}: seconds", each) for each in self.seconds)
        return Exchange(count, seconds, amount(f"{whose}: once", self.once))

    def scaled(self, factor: float) -> Exchange:
        """This exchange with all times times ``factor``."""
        seconds = tuple(each * factor for each in self.seconds)
        return Exchange(self.num_parts, seconds, self.once * factor)


def flow_shop(
    made: Sequence[float], seconds: Sequence[float], free: Sequence[float] | None = None
) -> list[list[tuple[float, float]]]:
    """When each part passes each thing, where every thing takes parts in their order.

    Gradients of a server whose accelerators have no link but PCIe are summed among these, go to the
    host, over the network, and back: five things to pass.

    >>> passes = flow_shop([0, 0, 0], seconds=[1, 1, 4, 1, 1])
    >>> passes[-1][-1] == (15, 16) and 16 == (1 + 1 + 4 + 1 + 1) + (3 - 1) * 4
    True

    Args:
        made: when each part is there, in the order in which parts go.
        seconds: how long a part takes on each thing, in the order in which it passes them.
        free: from when on each thing is free; by default all are from the beginning.

    Returns:
        For each part, (start, end) on each thing.
    """
    until = [0.0] * len(seconds) if free is None else [*free]
    passes = []
    for there in made:
        row, left = [], there
        for place, took in enumerate(seconds):
            start = max(left, until[place])
            left = until[place] = start + took
            row.append((start, left))
        passes.append(row)
    return passes
