"""What several stages or ranks hold of a model, so that no forward may write it.

On one device, each forward reads what the forwards before it have written. Stages and ranks run
theirs in another order, or at the same time, and processes do not even see what others write. What
one stage on one rank holds alone is written and read in the right order.

Writing is seen by version counters and by which tensor it is, after every forward. Some operations
count no version (batch norm, and what works on ``.data``), so values of buffers are compared too:
once all forwards have run, and before weights change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.base.errors import ModelError


class SharedTensor(NamedTuple):
    """A buffer or parameter with several holders.

    Attributes:
        told: how errors name the tensor.
        holders: how errors name those who hold it.
        module: the module of this rank that has it.
        name: its name in that module.
    """

    told: str
    holders: str
    module: nn.Module
    name: str

    def now(self) -> Tensor | None:
        """The tensor itself."""
        module = self.module
        if self.is_buffer:
            return module._buffers.get(self.name)
        return module._parameters.get(self.name)

    @property
    def is_buffer(self) -> bool:
        """Whether the tensor is a buffer, and no parameter."""
        return self.name in self.module._buffers


class SharedState:
    """Notices when a forward of one rank writes what others hold as well.

    Args:
        tensors: what others hold too, by stage of the rank.
    """

    def __init__(self, tensors: Mapping[int, Sequence[SharedTensor]]) -> None:
        self._tensors = tensors
        self._values: list[tuple[SharedTensor, Tensor | None]] = []
        self._unchecked = False

    def begin(self) -> None:
        """Forwards will follow; from now on, values must stay what they are."""
        self._unchecked = False
        self._values = [
            (shared, None if (tensor := shared.now()) is None else tensor.detach().clone())
            for tensors in self._tensors.values()
            for shared in tensors
            if shared.is_buffer
        ]

    def watches(self, stage: int) -> bool:
        """Whether a stage holds anything that others hold."""
        return bool(self._tensors.get(stage))

    @contextmanager
    def unwritten(self, stage: int) -> Iterator[None]:
        """A forward of a stage.

        Raises:
            ModelError: it has written something.
        """
        tensors = self._tensors.get(stage, ())
        before = [_state(shared) for shared in tensors]
        yield
        self._unchecked = bool(self._values)
        for shared, (then, version) in zip(tensors, before, strict=True):
            now, version_now = _state(shared)
            if version_now != version if now is then else not _equal(now, then):
                raise _written(shared)

    def check(self) -> None:
        """All forwards have run, or weights are about to change.

        Raises:
            ModelError: a forward has written something without leaving a trace.
        """
        if self._unchecked:
            self._unchecked = False
            for shared, value in self._values:
                if not _equal(shared.now(), value):
                    raise _written(shared)


def _state(shared: SharedTensor) -> tuple[Tensor | None, int]:
    tensor = shared.now()
    counts = tensor is not None and not tensor.is_inference()
    return tensor, tensor._version if tensor is not None and counts else 0


def _equal(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    # NaN is not equal to itself.
    both_nan = first.isnan() & second.isnan()
    return torch.equal(first, second) or bool(((first == second) | both_nan).all())


def _written(shared: SharedTensor) -> ModelError:
    return ModelError(
        f"a forward has written {shared.told}, which {shared.holders} hold, so that none would see "
        "what it sees on one device; choose a schedule or cuts that leave it in one stage on one "
        "rank, or write it outside of forward"
    )
