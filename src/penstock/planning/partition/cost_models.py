"""What a stage and a cut cost in the steady state: three cost models, by name.

A pipeline's beat is its slowest part: a stage on its devices, or a cut on its links. All three
count seconds per microbatch and differ in three things: how long an exchange of gradients takes,
how much of it hides behind compute, and what a cut costs.

``pipedream-released``
    What PipeDream's published optimizer computes: ``(T + 4(m−1)·|w| / (m·B)) / m`` for a stage of T
    seconds and |w| bytes on m devices, and ``2·a / (m·B)`` for a cut of a bytes.
``pipedream-paper``
    What the paper says (SOSP'19, section 3.1): ``max(T, 2(m−1)·|w| / B) / m``, and ``2·a / B``.
``ring``
    A ring all-reduce: ``2(m−1)/m · |w| / B`` and 2(m−1) latencies. ``overlap`` is the share of it
    that compute can hide. A cut takes two messages with their latencies, shared by m devices.

The first two know no latencies.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.base.errors import InputError
from penstock.base.values import is_number, one_of, shown
from penstock.core.cluster import Link
from penstock.planning.partition.arrays import Array, np

ExchangeLine = tuple[float, float]
"""(seconds per byte of parameters, seconds besides) of an exchange of gradients."""

RELEASED, PAPER, RING = "pipedream-released", "pipedream-paper", "ring"

COST_MODELS = (RELEASED, PAPER, RING)
"""Names of the cost models."""


@dataclass(frozen=True)
class CostModel:
    """Seconds per microbatch of stages and cuts; see the module for the formulas.

    Attributes:
        name: one of ``COST_MODELS``.
        overlap: the share of a gradient exchange that compute can hide, between 0 and 1. Only
            ``ring`` leaves it free: the released optimizer adds the two (0), the paper takes the
            longer one (1). ``cost_model`` sees to that.
    """

    name: str
    overlap: float = 1.0

    def shared_seconds(
        self,
        compute_seconds: float,
        exchange_seconds: float,
        num_replicas: int,
        updates: float = 1.0,
    ) -> float:
        """Steady-state seconds per microbatch of a stage.

        Args:
            compute_seconds: forward and backward of one microbatch on one device.
            exchange_seconds: one exchange of gradients (``reduce_seconds``).
            num_replicas: devices that share the microbatches.
            updates: per microbatch; 1/m where m microbatches make one. Replicas exchange gradients
                once per update, and at most once per round in which each has one microbatch, which
                is what 1 means (PipeDream).
        """
        compute = compute_seconds / num_replicas
        exchange = exchange_seconds * min(updates, 1 / num_replicas)
        shown = 1 - self.overlap
        return max(compute, exchange) + shown * min(compute, exchange)

    def together(self, compute: Array, exchange: Array) -> Array:
        """``shared_seconds`` of many stages at once, whose two parts are shared already."""
        shown = 1 - self.overlap
        return np.asarray(np.maximum(compute, exchange) + shown * np.minimum(compute, exchange))

    def cut_seconds(self, num_bytes: float, num_replicas: int, link: Link) -> float:
        """Seconds per microbatch that a cut takes: a message forward, and its gradient back.

        Args:
            num_bytes: in one direction.
            num_replicas: of the side that has fewer, since each sends and receives at a time.
            link: the slowest that is used.
        """
        if self.name == RING:
            return 2 * link.seconds(num_bytes) / num_replicas
        return 2 * _transfer(num_bytes, link) / (num_replicas if self.shares_cuts else 1)

    @property
    def shares_cuts(self) -> bool:
        """Whether replicas share what a cut costs; not so in the paper's formulas."""
        return self.name != PAPER

    def reduce_seconds(self, parameter_bytes: float, num_replicas: int, link: Link) -> float:
        """Seconds of one exchange of gradients, alone.

        Args:
            parameter_bytes: of the stage.
            num_replicas: devices that have a copy each; one has nobody to ask.
            link: the slowest between them.
        """
        others = num_replicas - 1
        seconds = self.bytes_moved(num_replicas) * _transfer(parameter_bytes, link)
        return seconds + 2 * others * self.latency_seconds(link)

    def reduce_line(self, num_replicas: int, link: Link) -> ExchangeLine:
        """``reduce_seconds`` as a line over the bytes of parameters."""
        per_byte = 1 / link.bytes_per_second if link.bytes_per_second else 0.0
        base = self.reduce_seconds(0.0, num_replicas, link)
        return self.bytes_moved(num_replicas) * per_byte, base

    def bytes_moved(self, num_replicas: int) -> float:
        """How many bytes an exchange puts on a link for each byte of parameters."""
        others = num_replicas - 1
        if self.name == PAPER:
            return 2.0 * others
        return (4 if self.name == RELEASED else 2) * others / num_replicas

    def latency_seconds(self, link: Link) -> float:
        """What a message takes besides its bytes, for this model."""
        return link.latency_seconds if self.name == RING else 0.0


def cost_model(name: str, overlap: float = 1.0) -> CostModel:
    """The cost model called ``name``.

    Args:
        name: one of ``COST_MODELS``.
        overlap: for ``ring``: the share of a gradient exchange that compute can hide, 0 to 1. The
            other two have their own.

    Raises:
        InputError: no such name, or ``overlap`` is not between 0 and 1.
    """
    one_of("cost_model", name, COST_MODELS)
    if not is_number(overlap) or not 0 <= overlap <= 1:
        raise InputError(f"overlap is {shown(overlap)}, but must be a number between 0 and 1")
    fixed = {RELEASED: 0.0, PAPER: 1.0}
    return CostModel(name, fixed.get(name, float(overlap)))


def check_updates(updates: float) -> None:
    """Raise ``InputError`` unless these may be the updates per microbatch."""
    if not is_number(updates) or not 0 < updates <= 1:
        raise InputError(f"updates is {shown(updates)}, but must be a number above 0 and at most 1")


def _transfer(num_bytes: float, link: Link) -> float:
    return num_bytes / link.bytes_per_second if link.bytes_per_second else 0.0
