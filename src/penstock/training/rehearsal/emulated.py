"""Emulated parts of a rank: stages and optimizers that wait instead of computing, to the
microsecond where the machine lets them, and hand over as much as real ones; and links on which
messages take as long as planned, though this machine's are faster."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.core.schedule import Kind, Op
from penstock.core.timing.costs import Costs
from penstock.engine.stage.microbatch_graph import Gradients, InputGradients, Produced
from penstock.engine.stage.protocol import NO_SKIPS, Criterion, Keep
from penstock.engine.transport import Edge, Transport
from penstock.engine.transport.base import OnTop

_SHORT_SLEEP_SECONDS = 1e-3
_NUM_TRIALS = 31


class Alarm:
    """Wakes at a moment of ``time.perf_counter``, which all processes of a host share.

    A long sleep overshoots by more than a short one, and by how much is hard to say. So the last
    millisecond is a sleep of its own, shorter by what such a sleep is known to overshoot, and only
    the few microseconds behind it are spun away: the processor is needed by other ranks.

    Args:
        overshoot_seconds: of a short sleep; ``calibrated`` measures it.
    """

    def __init__(self, overshoot_seconds: float) -> None:
        self._overshoot_seconds = overshoot_seconds

    @classmethod
    def calibrated(cls) -> Alarm:
        """An alarm for this machine; takes about 20 ms."""
        overshoots = []
        for _ in range(_NUM_TRIALS):
            start = time.perf_counter()
            time.sleep(_SHORT_SLEEP_SECONDS / 2)
            overshoots.append(time.perf_counter() - start - _SHORT_SLEEP_SECONDS / 2)
        return cls(min(statistics.median(overshoots), _SHORT_SLEEP_SECONDS / 2))

    def until(self, moment: float) -> None:
        """Return at ``moment``, or at once if it has passed."""
        for spare in (_SHORT_SLEEP_SECONDS, self._overshoot_seconds):
            remaining = moment - time.perf_counter() - spare
            if remaining > 0:
                time.sleep(remaining)
        while time.perf_counter() < moment:
            pass


class Waits:
    """Lets the time of emulated ops pass.

    Each op takes its time from when it starts, as real compute does: whatever comes between ops
    (messages, the interpreter) makes the step longer.

    Args:
        costs: the seconds of each op.
        ends: when each op ends according to the prediction, counted from the start of the step; if
            given, it ends then: exact by construction and blind to overhead. For tests of order
            only.

    Attributes:
        start: when the step began, on every rank.
    """

    def __init__(self, alarm: Alarm, costs: Costs, ends: Mapping[Op, float] | None = None) -> None:
        self._alarm = alarm
        self._costs = costs
        self._ends = ends
        self.start = 0.0

    def wait(self, op: Op) -> None:
        """Let the time of ``op`` pass."""
        if self._ends is None:
            self._alarm.until(time.perf_counter() + self._costs.duration(op))
        else:
            self._alarm.until(self.start + self._ends[op])


class PlannedLinks(OnTop):
    """Hands messages over by another transport, and keeps each back until it would have come.

    Args:
        inner: carries them.
        alarm: wakes when a message may be used.
        hop_seconds: planned, of each edge; those that are not there take what they take.
        link_seconds: of these, how long a message keeps others between the same ranks waiting.
    """

    def __init__(
        self,
        inner: Transport,
        alarm: Alarm,
        hop_seconds: Mapping[Edge, float],
        link_seconds: Mapping[Edge, float],
    ) -> None:
        super().__init__(inner)
        self._alarm = alarm
        self._hop_seconds = hop_seconds
        self._link_seconds = link_seconds
        self._free: dict[tuple[int, int], float] = {}

    def send(self, edge: Edge, number: int, value: Any) -> None:
        hop = self._hop_seconds.get(edge)
        if hop:
            # A tensor: as part of a message's description it would make each one a new kind.
            value = value, torch.tensor(self._leaves(edge) + hop, dtype=torch.float64)
        self.inner.send(edge, number, value)

    def _leaves(self, edge: Edge) -> float:
        """When a message that is ready now begins its way."""
        ranks = edge.source, edge.target
        leaves = max(time.perf_counter(), self._free.get(ranks, 0.0))
        self._free[ranks] = leaves + self._link_seconds.get(edge, 0.0)
        return leaves

    def recv(self, edge: Edge, number: int, waiting: str) -> Any:
        value = self.inner.recv(edge, number, waiting)
        if self._hop_seconds.get(edge):
            value, usable = value
            self._alarm.until(usable.item())
        return value


class EmulatedStage:
    """A ``RunnableStage`` whose compute is a wait.

    Args:
        is_last: whether its output is a loss.
        message_bytes: the size of its output, and of the gradient of its input.
        waits: how the time of an op passes.
    """

    def __init__(self, index: int, is_last: bool, message_bytes: int, waits: Waits) -> None:
        self._index = index
        self.layer_modules: tuple[nn.Module, ...] = ()
        self._waits = waits
        self._kept: dict[int, Any] = {}
        # What is in a message is nobody's business, so that one block of memory serves for all:
        # fresh ones would cost page faults that no plan asked for.
        self._message = torch.zeros(message_bytes, dtype=torch.uint8)
        self._output = torch.zeros(()) if is_last else self._message

    def forward(
        self,
        microbatch: int,
        inputs: Any,
        step: int = 0,
        criterion: Criterion | None = None,
        keep: Keep = Keep.EVERYTHING,
        skips: Mapping[str, Any] = NO_SKIPS,
        first: int = 0,
    ) -> Produced:
        """F: wait. Keeps the input until B or W, as a real stage does."""
        self._kept[microbatch] = inputs
        self._wait(Kind.FORWARD, microbatch)
        return Produced(self._output, {})

    def recompute(self, microbatch: int, keep: Keep = Keep.EVERYTHING) -> None:
        """R: wait."""
        self._wait(Kind.RECOMPUTE, microbatch)

    def backward(
        self,
        microbatch: int,
        gradients: Gradients,
        skip_gradients: Mapping[str, Gradients] = NO_SKIPS,
    ) -> InputGradients:
        """B: wait."""
        self._wait(Kind.BACKWARD, microbatch)
        del self._kept[microbatch]
        return self._input_gradients()

    def backward_input(
        self,
        microbatch: int,
        gradients: Gradients,
        skip_gradients: Mapping[str, Gradients] = NO_SKIPS,
    ) -> InputGradients:
        """I: wait."""
        self._wait(Kind.BACKWARD_INPUT, microbatch)
        return self._input_gradients()

    def backward_weight(self, *microbatches: int) -> None:
        """W of one or several: wait for each."""
        for microbatch in microbatches:
            self._wait(Kind.BACKWARD_WEIGHT, microbatch)
            del self._kept[microbatch]

    def held(self, microbatch: int) -> list[Tensor]:
        """Nothing: what it keeps takes no memory that a plan counts."""
        return []

    def forget(self) -> None:
        """Drop what unfinished microbatches have left."""
        self._kept.clear()

    def _input_gradients(self) -> InputGradients:
        gradients: list[Tensor | None] = [self._message]
        return InputGradients(gradients, {})

    def _wait(self, kind: Kind, microbatch: int) -> None:
        self._waits.wait(Op(self._index, kind, microbatch))


class EmulatedOptimizer(torch.optim.Optimizer):
    """An optimizer whose step is a wait.

    Args:
        parameters: the stage's; they stay as they are, gradients too, for they are never computed.
        updates: the ops that it stands for, in the order in which it performs them; after the last
            one, the next step begins with the first.
        waits: how its time passes.
    """

    def __init__(self, parameters: list[nn.Parameter], updates: Sequence[Op], waits: Waits) -> None:
        super().__init__(parameters, {})
        self._updates = itertools.cycle(updates)
        self._waits = waits

    def step(self, closure: Any = None) -> Any:
        """UPDATE: wait."""
        self._waits.wait(next(self._updates))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Gradients of the right size serve for every step."""
