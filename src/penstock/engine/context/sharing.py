"""From a plan's ``"context"`` splits to the layers of one member; and ``RingHeads``, the
``nn.MultiheadAttention`` of such layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from penstock.base.errors import ModelError
from penstock.engine.context.outputs import OUTPUTS
from penstock.engine.context.ring import ring_attention
from penstock.engine.context.writing import LayerCode, written
from penstock.engine.following.writer import SHARERS
from penstock.engine.model.spine import NamedLayer
from penstock.engine.tensor.attention import HeadAttention
from penstock.engine.tensor.chain import LayerSharing
from penstock.engine.tensor.group import TensorGroup
from penstock.engine.tensor.layouts import SEQUENCE, WHOLE
from penstock.engine.tracing.layers import CapturedLayer


class RingHeads(HeadAttention):
    """Each member has all heads, for its positions; keys and values go round."""

    sharers: TensorGroup

    def forward(  # type: ignore[override]
        self, query: Tensor, key: Tensor, value: Tensor, length: int = 0
    ) -> tuple[Tensor, Any]:
        """The output, and no weights.

        Args:
            query, key, value: ``[rows, own positions, width]``, or the first two the other way
                round without ``batch_first``.
            length: of the sequence, where attention is causal; else 0.
        """
        given = [self._rows_first(each, True) for each in (query, key, value)]
        queries, keys, values = self._projected(*given)
        attended = ring_attention(queries, keys, values, self.sharers, length)
        return self._output(attended, True), None


CONTEXT = "context"
"""How a plan calls the split of a layer whose ranks share positions."""


class ContextModel:
    """A model whose sequence the members of a group share.

    Args:
        layers: of the whole model, all captured.
        size: how many members there are.

    Raises:
        ModelError: it mixes positions in other ways than a ring can.
    """

    def __init__(self, layers: Sequence[NamedLayer], size: int) -> None:
        self._layers = layers
        self._size = size
        self._codes: dict[tuple[int, bool], list[LayerCode]] = {}
        for training in (True, False):
            self.code(0, 0, training)

    @property
    def num_layers(self) -> int:
        """How many layers it has."""
        return len(self._layers)

    def code(self, layer: int, member: int, training: bool) -> LayerCode:
        """What a member runs of a layer, by their numbers, in a mode."""
        key = member, training
        if key not in self._codes:
            self._codes[key] = written(self._layers, training, self._size, member)
        return self._codes[key][layer]


@dataclass(frozen=True, kw_only=True)
class ContextSharing(LayerSharing):
    """How members share a layer by positions.

    Attributes:
        model: of which it is a layer.
        number: of the layer.
    """

    model: ContextModel
    number: int

    def given_to(self, layer: nn.Module, group: TensorGroup) -> nn.Module:
        """Make a copy of the layer a member's own.

        Args:
            layer: changed, and given back.
        """
        own = cast(CapturedLayer, layer)
        codes = {mode: self.model.code(self.number, group.index, mode) for mode in (True, False)}
        own.rewrite(lambda graph: next(
            codes[mode].graph for mode in codes if own.recorded(mode) is graph
        ))  # fmt: skip
        vars(own)[SHARERS] = group
        if self.number == self.model.num_layers - 1:
            vars(own)[OUTPUTS] = {mode: code.ways for mode, code in codes.items()}
        for path in {path for code in codes.values() for path in code.attentions}:
            attention = own.get_submodule(path)
            kind = type(attention)
            attention.__class__ = type(kind.__name__, (RingHeads, kind), {})
            vars(attention)[SHARERS] = group
        return own


def context_sharings(
    layers: Sequence[NamedLayer], splits: Sequence[str], sizes: Sequence[int]
) -> list[ContextSharing]:
    """How members share every layer of a model by positions.

    Args:
        layers: of the whole model.
        splits: how the plan splits each of them.
        sizes: how many members the group has that runs each.

    Raises:
        ModelError: not all layers are split so, or groups differ; a layer is not captured, or mixes
            positions in other ways than a ring can.
    """
    for layer, split in zip(layers, splits, strict=True):
        if split != CONTEXT:
            raise ModelError(
                f"layer {layer.name!r} is split as {split!r} and others as 'context', but context "
                "ranks share the positions of all layers; split every layer so, or none"
            )
        if not isinstance(layer.module, CapturedLayer):
            raise ModelError(
                f"layer {layer.name!r} ({type(layer.module).__name__}) is split as 'context', so "
                "what its code does with positions must be known: give profile and Pipeline the "
                "model that pk.capture(model, inputs) makes"
            )
    if len({*sizes}) > 1:
        raise ModelError(
            f"stages have {' and '.join(map(str, sorted({*sizes})))} context ranks, but all share "
            "the same positions; give each stage the same number"
        )
    model = ContextModel(layers, sizes[0])
    return [
        ContextSharing(layer.name, WHOLE, SEQUENCE, SEQUENCE, WHOLE, model=model, number=number)
        for number, layer in enumerate(layers)
    ]
