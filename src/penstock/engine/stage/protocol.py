"""The stage as an engine sees it: one function per kind of compute op, and what is still kept.

``Stage`` has layers and answers with them; a rehearsal's stages only wait. An engine is written for
both, so it sees no more than this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, Protocol

from torch import Tensor, nn

from penstock.engine.stage.microbatch_graph import Gradients, InputGradients, Produced

Criterion = Callable[[Any], Tensor]
"""From a stage's output to the loss of that microbatch."""


@dataclass(frozen=True, slots=True)
class LossOfTargets:
    """A criterion of which is known what it consists of.

    Attributes:
        loss: of (output, targets).
        targets: what the output is compared with.
        look: to be shown the output, by itself, before the loss is used; nothing of the loss
            depends on it.
    """

    loss: Callable[[Any, Any], Tensor]
    targets: Any
    look: Callable[[Any], None] | None = None

    def __call__(self, outputs: Any) -> Tensor:
        """The loss of the microbatch."""
        if self.look is not None:
            self.look(outputs)
        return self.loss(outputs, self.targets)


NO_SKIPS: Mapping[str, Any] = MappingProxyType({})


class Keep(Enum):
    """How much a forward keeps, by what will come after it."""

    EVERYTHING = "one full backward will come"
    SPLIT = "backward_input will come, then backward_weight"
    INPUT = "recompute will come, so nothing but the input is kept"


class StageGraph(Protocol):
    """All that one microbatch leaves behind on a stage until its backward.

    Attributes:
        parameters: whose gradients the backward may accumulate.
    """

    parameters: Sequence[Tensor]

    @property
    def deferral(self) -> DeferredGradients | None:
        """Where weight gradients wait, if the backward is split."""

    def backward(
        self, gradients: Gradients, skip_gradients: Mapping[str, Gradients]
    ) -> InputGradients:
        """Go back once; what is not deferred accumulates in ``.grad`` of the parameters.

        Args:
            gradients: of the output's leaves.
            skip_gradients: of the leaves of skips, by key; those of the last reader first.
        """

    @property
    def output_shapes(self) -> Sequence[tuple[int, ...] | None]:
        """The shape of each leaf of the output that has a gradient."""

    def differentiated(self, produced: Produced) -> Iterable[Tensor]:
        """The tensors of what the forward has produced through which gradients come back."""

    def held(self) -> list[Tensor]:
        """The tensors that are kept outside of autograd's graph."""


class DeferredGradients(Protocol):
    """Gradients of weights that are still to be computed."""

    def run(self) -> None:
        """Compute what was put off and accumulate it in ``.grad``."""

    def held(self) -> list[Tensor]:
        """The tensors kept for that."""


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
