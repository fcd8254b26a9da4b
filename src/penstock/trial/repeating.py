"""What is trained several times must begin the same each time."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from penstock.base.errors import InputError
from penstock.engine.model import tree
from penstock.trial.workload import Workload


def check_repeats(workload: Workload) -> None:
    """Build the model twice and make the first minibatch twice, and compare, to the bit.

    Raises:
        InputError: the second is another one; names ``build_model`` and a weight, or ``batches``.
    """
    first, second = (workload.build_model().state_dict() for _ in range(2))
    other = next((name for name in first if not _same(first[name], second.get(name))), None)
    if other is not None:
        raise InputError(
            f"build_model of the workload {workload.name} gives another {other} when it is called "
            "again, so methods could not begin with the same weights; seed it inside, as with "
            "torch.manual_seed(0)"
        )
    if not _same(workload.first_batch(), workload.first_batch()):
        raise InputError(
            f"batches of the workload {workload.name} gives another first minibatch when it is "
            "called again, so methods could not train on the same data; seed it inside, or give "
            "its data a torch.Generator of its own"
        )


def _same(first: Any, second: Any) -> bool:
    ours, theirs = list(tree.tensors(first)), list(tree.tensors(second))
    return len(ours) == len(theirs) and all(map(_same_bits, ours, theirs))


def _same_bits(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    # What is no number does not equal itself.
    return bool(((first == second) | (first.isnan() & second.isnan())).all())
