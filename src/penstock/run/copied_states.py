"""The state of this process's stages, copied to main memory, and as the unsplit model's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from penstock.model import tree
from penstock.run.assembly import Assembly


def copied_states(parts: Assembly) -> dict[int, dict[str, Any]]:
    """The state of each stage, copied to main memory, with all updates made; nothing may run
    meanwhile."""
    copies: dict[tuple[Any, ...], Tensor] = {}

    def copied(tensor: Tensor) -> Tensor:
        # What is tied stays so.
        key = tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        if key not in copies:
            copies[key] = tensor.detach().to("cpu", copy=True)
        return copies[key]

    states: dict[int, dict[str, Any]] = {}
    if parts.plan.spill is None:
        return dict(tree.replace(Tensor, copied, parts.states()))
    for worker in parts.workers:
        worker.settle()
        for index in worker.stages:
            with worker.visiting(index):
                held = parts.stages[index].state_dict()
                states[index] = tree.replace(Tensor, copied, held)
                del held  # nothing may see a stage when it leaves
                copies.clear()  # what comes next may come to the same place
    return dict(sorted(states.items()))


def by_key(states: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """The states of stages as that of the model."""
    return {key: value for _, state in sorted(states.items()) for key, value in state.items()}
