"""Whole values of layers in a process that trains parts of them: there for one layer at a time.

Layers are divided since whole ones take too much memory; beside the parts of them, the tensors of
the model that the user has built would take it all the same. So layer by layer, whole values come
(from the model, a file, or drawn), members are made equal, each takes its parts, and the whole
tensors of the model go to ``meta``: names, shapes and what is frozen stay, numbers do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

import torch
from torch import nn

from penstock.base.errors import ModelError
from penstock.engine.model.spine import NamedLayer
from penstock.engine.run.materialising import Values
from penstock.engine.tensor.group import TensorGroup

_MARK = "_penstock_in_parts"


class Wholes:
    """Brings the whole values of layers, and takes them away again.

    Args:
        layers: of one rank, by their numbers in the model.
        values: where they have their initial values from.
        group: the rank's; its channels take what is in main memory.
        divided: the ids of the model's tensors of which members have parts.
    """

    def __init__(
        self,
        layers: Mapping[int, NamedLayer],
        values: Values,
        group: TensorGroup,
        divided: Collection[int],
    ) -> None:
        self._numbers = {layer.name: number for number, layer in layers.items()}
        self._values = values
        self._group = group
        self._divided = divided
        self._times_wanted = Counter(
            id(parameter) for layer in layers.values() for parameter in layer.module.parameters()
        )

    def come(self, layer: NamedLayer) -> None:
        """Give a layer the values that all members begin with."""
        self._values.draw(self._numbers[layer.name])
        module = layer.module
        held = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
        with torch.no_grad():
            for tensor in held.values():
                tensor.copy_(self._group.of_first(tensor.detach().cpu()))

    def go(self, layer: NamedLayer) -> None:
        """Of what members have parts, drop the whole, unless another layer is tied to it."""
        for parameter in layer.module.parameters():
            self._times_wanted[id(parameter)] -= 1
            if id(parameter) in self._divided and not self._times_wanted[id(parameter)]:
                _drop(parameter)


def _drop(parameter: nn.Parameter) -> None:
    """Let a parameter be the object that it is, without numbers."""
    nothing = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    vars(nothing).update(vars(parameter))
    vars(nothing)[_MARK] = True
    # torch refuses where a graph or a weak reference of the user's still needs it.
    with suppress(RuntimeError):
        torch.utils.swap_tensors(parameter, nothing)  # type: ignore[no-untyped-call]


def check_there(layers: Sequence[NamedLayer]) -> None:
    """Raise ``ModelError`` for a model whose values an earlier pipeline has kept in parts: they
    would be drawn anew."""
    for layer in layers:
        for name, parameter in layer.module.named_parameters():
            if parameter.is_meta and getattr(parameter, _MARK, False):
                raise ModelError(
                    f"{layer.key(name)!r} has no values any more: an earlier Pipeline has trained "
                    "it in parts, of which this process had one; build the model anew, and load a "
                    "checkpoint or what gather_state_dict() gave"
                )
