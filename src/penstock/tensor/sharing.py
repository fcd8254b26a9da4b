"""From a copy of a layer, with a member's parts of its parameters, to the layer of that member."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from torch import Tensor, nn

from penstock.errors import ModelError
from penstock.tensor.chain import LayerSharing
from penstock.tensor.cuts import Cut
from penstock.tensor.dropout import DROPOUTS, PartChannelDropout, PartDropout
from penstock.tensor.group import Group
from penstock.tensor.layouts import FEATURES, WHOLE, Layout, converted
from penstock.tensor.membership import Member, Membership, Outside, RecordedRegion, Region
from penstock.tensor.recorded import for_member
from penstock.tracing.layers import CapturedLayer


class SharedLayer(nn.Module):
    """A layer of a chain that takes its input in one layout and gives its output in another.

    Attributes:
        sharing: which they are.
        sharers: the group.
        region: where its forward is. If it ends behind a ``column`` that no ``row`` has taken up,
            its output lies by features.
    """

    sharing: LayerSharing
    sharers: Group
    region: Region

    def __call__(self, value: Any, **recalled: Any) -> Any:
        """As its own class, on the member's part of everything. Its forward and its hooks see what
        the layer reads and gives."""
        value, recalled = self._taken(value, recalled)
        with self.region.opened(divided=self.sharing.reads is not WHOLE):
            return self._given(super().__call__(value, **recalled))

    def _taken(self, value: Any, recalled: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """What comes to the layer, in the layouts that it reads."""
        how, group, name = self.sharing, self.sharers, self.sharing.name
        value = converted(value, how.have, how.reads, group, name)
        return value, {
            key: converted(skip, how.recalls[key], how.reads, group, name)
            for key, skip in recalled.items()
        }

    def _given(self, output: Any) -> Any:
        """What goes from the layer, in the layout in which it leaves."""
        how, group, name = self.sharing, self.sharers, self.sharing.name
        gives = self._left_by_features() if how.inner and self.region.inside else how.gives
        self.region.end()
        if gives == how.leaves:
            return output
        if getattr(self, "stashes", ()):
            output, stashed = output
            return converted(output, gives, how.leaves, group, name), stashed
        return converted(output, gives, how.leaves, group, name)

    def _left_by_features(self) -> Layout:
        if any(cut.blocks > 1 for way in self.sharing.inner.values() for cut in way.cuts.values()):
            raise ModelError(
                f"layer {self.sharing.name!r} ends behind a module whose outputs are several "
                'pieces ("column/3"), so that nobody knows the order of its features; let a "row" '
                "follow in the same layer"
            )
        return FEATURES


class SlicedLayer(SharedLayer):
    """One that can run on a slice of the sequence. What it carries to the next slice stays with the
    member, in whatever layout it is."""

    def forward_slice(self, value: Any, carry: Any, **recalled: Any) -> Any:
        """As its own class, on the member's part of everything."""
        if self.region.open:  # it is its own forward that calls
            return super().forward_slice(value, carry, **recalled)  # type: ignore[misc]
        value, recalled = self._taken(value, recalled)
        with self.region.opened(divided=self.sharing.reads is not WHOLE):
            result = super().forward_slice(value, carry, **recalled)  # type: ignore[misc]
            if not isinstance(result, tuple) or len(result) != 2:
                return result  # whoever called says what is wrong
            return self._given(result[0]), result[1]


def shared(layer: nn.Module, sharing: LayerSharing, group: Group, original: nn.Module) -> nn.Module:
    """Make a copy of a layer a member's own; its parameters must be parts already.

    Args:
        layer: changed, and given back.
        original: the user's, with whole parameters.
    """
    is_recorded = isinstance(layer, CapturedLayer) and bool(sharing.inner)
    region = (RecordedRegion if is_recorded else Region)(sharing.name)
    for path, module in [*layer.named_modules()]:
        way = sharing.inner.get(path) if path else sharing.own
        name = f"{sharing.name}.{path}" if path else sharing.name
        gives = WHOLE if way is None else sharing.gives if way.adds else way.features
        membership = Membership(group, name, region, sharing.reads, gives)
        if way is not None:
            _become(module, way.kind, membership)
        elif isinstance(module, DROPOUTS):
            of_numbers = isinstance(module, nn.Dropout)
            _become(module, PartDropout if of_numbers else PartChannelDropout, membership)
        elif sharing.inner and module._parameters:
            _become(module, Outside, membership)
    if not sharing.is_plain:
        kind = type(layer)
        outside = SlicedLayer if hasattr(kind, "forward_slice") else SharedLayer
        layer.__class__ = type(kind.__name__, (outside, kind), {})
        outer = cast(SharedLayer, layer)
        outer.sharing, outer.sharers, outer.region = sharing, group, region
    if is_recorded:
        cast(CapturedLayer, layer).rewrite(
            lambda graph: for_member(graph, original.get_submodule, sharing.inner, group)
        )
    return layer


def _become(module: nn.Module, kind: type[Member], membership: Membership) -> None:
    own = type(module)
    module.__class__ = type(own.__name__, (kind, own), {})
    cast(Member, module).membership = membership


def cut_tensors(layer: nn.Module, sharing: LayerSharing) -> Iterator[tuple[Tensor, Cut]]:
    """The parameters and buffers of a layer of which members have parts."""
    ways = {**sharing.inner, **({"": sharing.own} if sharing.own else {})}
    for path, way in ways.items():
        module = layer.get_submodule(path)
        held: Mapping[str, Tensor | None] = {**module._parameters, **module._buffers}
        for key, cut in way.cuts.items():
            tensor = held.get(key)
            if tensor is not None:
                yield tensor, cut
        if way.bias and sharing.gives == way.features:  # it is added behind the sum
            bias = held.get(way.bias)
            if bias is not None:
                yield bias, Cut(0)


def terms(layer: nn.Module, sharing: LayerSharing) -> Iterator[Tensor]:
    """The parameters of a layer that all members repeat, each with one term of the gradient."""
    cut = {id(tensor) for tensor, _ in cut_tensors(layer, sharing)}
    # What a divided layer has besides is added behind a sum, where the output lies.
    lies = sharing.reads if sharing.own is None else sharing.gives
    if lies is not WHOLE:
        yield from (one for one in layer.parameters() if id(one) not in cut)
        return
    for path, way in sharing.inner.items():
        if way.alike:
            yield from layer.get_submodule(path).parameters()
