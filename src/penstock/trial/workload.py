"""``Workload``: everything a training script holds, as one value that the command line can take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from penstock.base.errors import InputError
from penstock.core.graph import LayerGraph
from penstock.engine.model import microbatches, tree
from penstock.training.profiler import profile
from penstock.training.profiler.alone import Progress
from penstock.training.profiler.profiling import traced_unless_a_chain

Batch = tuple[Any, Any]
_TRACED_ROWS = 4


@dataclass(frozen=True)
class Workload:
    """A model and everything needed to train it.

    Attributes:
        build_model: makes the model, with the same weights at every call.
        loss: from (output, targets) of a microbatch to a scalar, a mean over rows.
        optimizer: makes an optimizer of parameters.
        batches: makes an iterator of (inputs, targets) minibatches, the same at every call.
        held_out: (inputs, targets) to evaluate on, or ``None``.
        name: shown to people.
        unit: what one element of the targets is, for throughput (``"token"``, ``"image"``).
        notes: shown to people: where the data comes from, and so on.
    """

    build_model: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    batches: Callable[[], Iterator[Batch]]
    held_out: Batch | None = None
    name: str = "model"
    unit: str = "row"
    notes: str = field(default="")

    def num_units(self) -> int:
        """How many elements the targets of one minibatch have.

        Raises:
            InputError: there is no minibatch.
        """
        _, targets = self.first_batch()
        return sum(tensor.numel() for tensor in tree.tensors(targets))

    def first_batch(self) -> Batch:
        """Make the first minibatch.

        Raises:
            InputError: there is none.
        """
        first = next(self.batches(), None)
        if first is None:
            raise InputError(f"the workload {self.name} yields no minibatch")
        return first

    def profile(
        self,
        num_microbatches: int,
        *,
        repeats: int = 7,
        sizes: Sequence[int] = (),
        ranks: int | None = None,
        patience_seconds: float | None = None,
        progress: Progress | None = None,
    ) -> LayerGraph:
        """Profile the model on the first microbatch of the first minibatch.

        Args:
            num_microbatches: into which the minibatch is cut.
            repeats, ranks, patience_seconds, progress: as ``penstock.profile`` takes them.
            sizes: other microbatch sizes to measure, of at most the rows of the minibatch.

        Raises:
            InputError: there is no minibatch, or it has fewer rows than microbatches or than one of
                the ``sizes``.
        """
        if num_microbatches < 1:
            raise InputError(f"the number of microbatches is {num_microbatches}, but must be ≥ 1")
        inputs, targets = self.first_batch()
        rows = microbatches.num_rows(inputs, "inputs")
        if rows < num_microbatches:
            raise InputError(
                f"a minibatch of {rows} rows cannot be cut into {num_microbatches} microbatches; "
                f"ask for at most {rows}"
            )
        if max(sizes, default=0) > rows:
            raise InputError(
                f"sizes: a minibatch of {rows} rows has no microbatch of {max(sizes)}; ask for at "
                f"most {rows}"
            )
        asked = -(-rows // num_microbatches)
        largest = max(asked, *sizes, 1)
        graph = profile(
            self.build_model(),
            _first_rows(inputs, largest),
            loss=self.loss,
            targets=_first_rows(targets, largest),
            optimizer=self.optimizer,
            repeats=repeats,
            sizes=[*sizes, asked],
            ranks=ranks,
            patience_seconds=patience_seconds,
            progress=progress,
        )
        others = [graph.at(size) for size in graph.sizes if size != asked]
        return replace(
            graph.at(asked), other_sizes=tuple(replace(other, other_sizes=()) for other in others)
        )

    def build_in_layers(self) -> nn.Module:
        """The model, captured if it names no spine."""
        inputs, _ = self.first_batch()
        return traced_unless_a_chain(self.build_model(), _first_rows(inputs, _TRACED_ROWS))


def _first_rows(value: Any, num_rows: int) -> Any:
    return tree.replace(Tensor, lambda tensor: tensor[:num_rows].clone(), value)
