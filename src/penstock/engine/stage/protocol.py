"""The stage as an engine sees it: one function per kind of compute op, and what is still kept.

``Stage`` has layers and answers with them; a rehearsal's stages only wait. An engine is written for
both, so it sees no more than this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from penstock.engine.stage.microbatch_graph import Gradients, InputGradients

Criterion = Callable[[Any], Tensor]
"""From a stage's output to the loss of that microbatch."""

NO_SKIPS: Mapping[str, Any] = MappingProxyType({})


class Keep(Enum):
    """How much a forward keeps, by what will come after it."""

    EVERYTHING = "one full backward will come"
    SPLIT = "backward_input will come, then backward_weight"
    INPUT = "recompute will come, so nothing but the input is kept"


class Produced(NamedTuple):
    """The results of a forward, detached.

    Attributes:
        value: the output, or the loss if there is a criterion.
        skips: what layers stashed for later stages, by key.
    """

    value: Any
    skips: dict[str, Any]


class RunnableStage(Protocol):
    """A stage as an engine sees it; ``Stage`` says what the functions do in detail.

    Where microbatches are sliced, the number of a microbatch stands for that of a slice in all
    functions: microbatch × number of slices + slice.
    """

    @property
    def layer_modules(self) -> Sequence[nn.Module]:
        """The modules of the layers, in their order: what observers watch, and whose parameters and
        buffers are no activations. Empty if it computes nothing."""

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
        """F: run one microbatch, and keep of it what will be needed."""

    def recompute(self, microbatch: int, keep: Keep = Keep.EVERYTHING) -> None:
        """R: run the forward again, which had kept the input only."""

    def backward(
        self,
        microbatch: int,
        gradients: Gradients,
        skip_gradients: Mapping[str, Gradients] = NO_SKIPS,
    ) -> InputGradients:
        """B: full backward of one microbatch."""

    def backward_input(
        self,
        microbatch: int,
        gradients: Gradients,
        skip_gradients: Mapping[str, Gradients] = NO_SKIPS,
    ) -> InputGradients:
        """I: the gradients of the input; ``backward_weight`` follows."""

    def backward_weight(self, *microbatches: int) -> None:
        """W: what ``backward_input`` has put off."""

    def held(self, microbatch: int) -> list[Tensor]:
        """Tensors kept of a microbatch outside of autograd's graph, for those who count memory."""

    def forget(self) -> None:
        """Drop what unfinished microbatches have left, after a failed step."""
