"""The state of this process's stages, copied to main memory, and as the unsplit model's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from penstock.engine.model import tree
from penstock.engine.run.assembly import Assembly


def copied_states(parts: Assembly) -> dict[int, dict[str, Any]]:
    """The state of each stage, copied to main memory, with all updates made; nothing may run
    meanwhile."""
    states: dict[int, dict[str, Any]] = {}
    if parts.plan.spill is None:
        return copied(parts.states())
    for worker in parts.workers:
        worker.settle()
        for index in worker.stages:
            with worker.visiting(index):
                # Nothing may see a stage when it leaves; the next may come to the same place.
                states |= copied({index: parts.stages[index].state_dict()})
    return dict(sorted(states.items()))


def copied(states: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """The states of stages, copied to main memory; what is tied stays so."""
    copies: dict[tuple[Any, ...], Tensor] = {}

    def copy_of(tensor: Tensor) -> Tensor:
        key = tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        if key not in copies:
            copies[key] = tensor.detach().to("cpu", copy=True)
        return copies[key]

    return {k: dict(tree.replace(Tensor, copy_of, state)) for k, state in states.items()}


def by_key(states: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """The states of stages as that of the model."""
    return {key: value for _, state in sorted(states.items()) for key, value in state.items()}
