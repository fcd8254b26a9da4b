"""A stage without layers: it takes its time and hands over as much as a real one would."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.core.schedule import Kind, Op
from penstock.engine.stage.microbatch_graph import Gradients, InputGradients
from penstock.engine.stage.protocol import NO_SKIPS, Criterion, Keep, Produced
from penstock.training.rehearsal.waits import Waits


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
