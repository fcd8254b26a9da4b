"""The memory that each layer keeps for its backward, measured by unique storages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.engine.model import tree
from penstock.engine.stage.deferral import Deferral, undeferred_parameters
from penstock.engine.stage.microbatch_graph import cut, edges
from penstock.training.profiler.alone.chain import RunLayer

_NOBODY = -1


class Footprint(NamedTuple):
    """Bytes that one layer keeps of one microbatch.

    Attributes:
        activation: what autograd keeps from forward to backward and no earlier layer keeps.
        held_input: its input, if neither it nor an earlier layer keeps that anyway. A stage that
            begins with the layer holds it, because the gradient is handed back by it.
        weight_kept: what stays from the input gradient until the weight gradient of a split
            backward.
    """

    activation: int
    held_input: int
    weight_kept: int


def measure_footprints(
    modules: Sequence[nn.Module], runs: Sequence[RunLayer], inputs: Any
) -> list[Footprint]:
    """Run layers one after the other, and measure what each keeps.

    Args:
        runs: the same as functions, cut off from each other; the last may go on to the loss.
        inputs: the first layer's; they are not overwritten.
    """
    owners = {
        tensor.untyped_storage().data_ptr(): _NOBODY
        for module in modules
        for tensor in (*module.parameters(), *module.buffers())
    }
    alive, kept, values = [], [], [_cloned(inputs)]
    for index, run in enumerate(runs):
        sizes: list[int] = []

        def keep(tensor: Tensor, index: int = index, sizes: list[int] = sizes) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in owners:
                owners[storage.data_ptr()] = index
                sizes.append(storage.nbytes())
            return tensor

        _, value = cut(values[index], index > 0)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            values.append(run(value))
        alive.append(value)  # so that no storage address is used twice
        kept.append(sum(sizes))
    return [
        Footprint(
            kept[index],
            sum(
                size
                for address, size in _storages(tree.tensors(values[index])).items()
                if owners.get(address, _NOBODY) < index
            ),
            _weight_kept(modules[index], run, values[index], index > 0),
        )
        for index, run in enumerate(runs)
    ]


def _weight_kept(module: nn.Module, run: RunLayer, value: Any, wants_gradient: bool) -> int:
    _, own = cut(_cloned(value), wants_gradient)
    deferral = Deferral(undeferred_parameters(module.modules()))
    with deferral:
        output = run(own)
    pairs = [
        (edge, torch.ones_like(tensor))
        for edge, tensor in zip(edges(output), tree.flatten(output)[0], strict=True)
        if edge is not None
    ]
    if pairs:
        ends, seeds = zip(*pairs, strict=True)
        with deferral:
            torch.autograd.backward(ends, seeds)
        deferral.settle()
    return sum(_storages(deferral.held()).values())


def _cloned(value: Any) -> Any:
    return tree.replace(Tensor, Tensor.clone, value)


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}
