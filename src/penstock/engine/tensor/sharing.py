"""From a copy of a layer, with a member's parts of its parameters, to the layer of that member."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from typing import Any, cast

import torch
from torch import Tensor, nn

from penstock.base.errors import ModelError, PenstockError
from penstock.engine.device.accelerators import is_on_host
from penstock.engine.model import tree
from penstock.engine.model.spine import state_of
from penstock.engine.tensor.chain import LayerSharing
from penstock.engine.tensor.divided_layers import DROPOUTS, ShardChannelDropout, ShardDropout
from penstock.engine.tensor.first_run import Expected, difference, divided_dimension, on_one_device
from penstock.engine.tensor.group import ShardSpec, TensorGroup
from penstock.engine.tensor.layouts import (
    ROWS,
    SEQUENCE,
    WHOLE,
    Layout,
    Layouts,
    converted,
)
from penstock.engine.tensor.membership import (
    GroupMember,
    Membership,
    RecordedRegion,
    Region,
    UndividedModule,
)
from penstock.engine.tensor.recorded import for_member
from penstock.engine.tracing.layers import CapturedLayer


class FirstRun:
    """Compares the first run of a divided layer with one device.

    What members tell each other then is as much for all of them, whatever they find.

    Args:
        original: the user's layer.
        due: whether the first run is still to come; otherwise nothing is compared.
    """

    def __init__(self, original: nn.Module, *, due: bool) -> None:
        self._original = original
        self._compares = self._due = due
        self._expected: Expected | None = None
        self._dim: Layout = None
        self._refusal = ""

    def renew(self) -> None:
        """A step has failed, in which some members may have compared and others not: all do so
        again, since who compares and who does not would take each other's messages for others."""
        self._due, self._expected = self._compares, None

    def begin(self, layer: SharedLayer, value: Any, recalled: Mapping[str, Any]) -> None:
        """The layer is called with what comes to it.

        Raises:
            ModelError: the first run was not that of one device.
        """
        if self._refusal:
            raise ModelError(self._refusal)
        if not self._due:
            return
        how, group = layer.sharing, layer.sharers
        with torch.no_grad():
            value = converted(value, how.have, WHOLE, group, how.name)
            recalled = {
                key: converted(skip, how.recalls[key], WHOLE, group, how.name)
                for key, skip in recalled.items()
            }
            values = _whole_values(self._original, layer)
        self._expected = on_one_device(self._original, values, layer, (value, recalled))

    @contextmanager
    def explained(self, how: LayerSharing) -> Iterator[None]:
        """A context in which the layer runs; where one device has no trouble, its splits have."""
        try:
            yield
        except RuntimeError as error:
            if self._expected is None or isinstance(error, PenstockError):
                raise
            trouble = f"fails there ({type(error).__name__}: {error})"
            raise ModelError(_refusal(how, trouble)) from error

    def divided_dimension(self, output: Any, lies: Layouts) -> Layouts:
        """Along which dimension members have parts of an output that nobody has put together.

        Args:
            lies: as far as the module tells that has divided its outputs.
        """
        if self._expected is not None:
            self._dim = divided_dimension(output, self._expected.output)
        return lies if self._dim is None else self._dim

    def end(self, layer: SharedLayer, output: Any, gives: Layouts) -> None:
        """The layer has given its output in a layout.

        Raises:
            ModelError: together, members give something else than one device does.
        """
        if not self._due:
            return
        expected, self._expected = self._expected, None
        how = layer.sharing
        if getattr(layer, "stashes", ()):
            output = output[0]
            expected = None if expected is None else expected._replace(output=expected.output[0])
        trouble = ""
        try:
            with torch.no_grad():
                whole = converted(output, gives, WHOLE, layer.sharers, how.name)
        except RuntimeError as error:
            if isinstance(error, PenstockError):
                raise
            trouble = f"gives parts that do not fit together ({error})"
        self._due = False
        if not trouble and expected is not None:
            on_host = all(is_on_host(leaf.device) for leaf in tree.tensors(whole))
            trouble = difference(whole, expected.output, draws_alike=on_host or not expected.drew)
        if trouble:
            self._refusal = _refusal(how, trouble)
            raise ModelError(self._refusal)


def _refusal(how: LayerSharing, trouble: str) -> str:
    names = [f"{how.name}.{path}" if path else how.name for path in how.said]
    said = dict(zip(names, how.said.values(), strict=True))
    parts = {ROWS: "some of its rows", SEQUENCE: "some of its positions"}
    has = parts.get(how.reads, "") if how.reads is None or isinstance(how.reads, int) else ""
    why = "code in it mixes, or moves, what is divided"
    if has:
        why = f"each tensor rank has {has}, so what mixes them must be split, too"
    return (
        f"layer {how.name!r} does not compute what it computes on one device: split as "
        f'{said}, it {trouble}; {why}. Split attention in it as "heads", or its projections as '
        '"column" and "row", and let code between them take sizes from what it is given, as '
        '`unflatten(-1, (-1, head_width))` does; end a "column" with a "row" in the same layer; or '
        'let all tensor ranks repeat it ("whole")'
    )


def _whole_values(original: nn.Module, layer: SharedLayer) -> dict[int, Tensor]:
    """The whole parameters and buffers of a layer in main memory, by the ids of the user's."""
    group, cuts = (
        layer.sharers,
        {id(tensor): cut for tensor, cut in cut_tensors(original, layer.sharing)},
    )
    values: dict[int, Tensor] = {}
    for (_, theirs), (_, ours) in zip(state_of(original), state_of(layer), strict=True):
        if id(theirs) in values:
            continue
        whole = ours.detach()
        if id(theirs) in cuts:
            parts = [part.cpu() for part in group.exchange([whole] * group.size)]
            whole = cuts[id(theirs)].joined(parts)
        whole = whole.to("cpu", copy=True)
        is_parameter = isinstance(theirs, nn.Parameter)
        values[id(theirs)] = nn.Parameter(whole, False) if is_parameter else whole
    return values


class SharedLayer(nn.Module):
    """A layer of a chain that takes its input in one layout and gives its output in another.

    Attributes:
        sharing: which they are.
        sharers: the group.
        region: where its forward is. If it ends behind a ``column`` that no ``row`` has taken up,
            its output is divided as the column's, or where its first run has shown that it is.
        first_run: compares it with one device, once.
    """

    sharing: LayerSharing
    sharers: TensorGroup
    region: Region
    first_run: FirstRun

    def __call__(self, value: Any, **recalled: Any) -> Any:
        """As its own class, on the member's part of everything. Its forward and its hooks see what
        the layer reads and gives.

        Raises:
            ModelError: together, members compute something else than one device does.
        """
        self.first_run.begin(self, value, recalled)
        value, recalled = self._taken(value, recalled)
        with self.region.opened(divided=self._is_divided):
            with self.first_run.explained(self.sharing):
                output = super().__call__(value, **recalled)
            return self._given(output)

    def _taken(self, value: Any, recalled: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Inputs of the layer, in the layouts that it reads."""
        how, group, name = self.sharing, self.sharers, self.sharing.name
        value = converted(value, how.have, how.reads, group, name)
        return value, {
            key: converted(skip, how.recalls[key], how.reads, group, name)
            for key, skip in recalled.items()
        }

    def _given(self, output: Any) -> Any:
        """The output of the layer, in the layout in which it leaves."""
        how, group, name = self.sharing, self.sharers, self.sharing.name
        gives = how.gives
        if how.inner and self.region.inside:
            self._check_order()
            gives = self.first_run.divided_dimension(output, self.region.lies)
        self.region.end()
        self.first_run.end(self, output, gives)
        if gives == how.leaves:
            return output
        if getattr(self, "stashes", ()):
            output, stashed = output
            return converted(output, gives, how.leaves, group, name), stashed
        return converted(output, gives, how.leaves, group, name)

    @property
    def _is_divided(self) -> bool:
        """Whether what draws random numbers may do so for a part; recorded code never does."""
        return self.sharing.reads is not WHOLE and self.sharing.recorded is None

    def _check_order(self) -> None:
        if any(cut.blocks > 1 for way in self.sharing.inner.values() for cut in way.cuts.values()):
            raise ModelError(
                f"layer {self.sharing.name!r} ends behind a module whose outputs are several "
                'pieces ("column/3"), so that nobody knows the order of its features; let a "row" '
                "follow in the same layer"
            )


class SlicedLayer(SharedLayer):
    """One that can run on a slice of the sequence. What it carries to the next slice stays with the
    member, in whatever layout it is."""

    def forward_slice(self, value: Any, carry: Any, **recalled: Any) -> Any:
        """As its own class, on the member's part of everything."""
        if self.region.open:  # it is its own forward that calls
            return super().forward_slice(value, carry, **recalled)  # type: ignore[misc]
        value, recalled = self._taken(value, recalled)
        with self.region.opened(divided=self._is_divided):
            result = super().forward_slice(value, carry, **recalled)  # type: ignore[misc]
            if not isinstance(result, tuple) or len(result) != 2:
                return result  # whoever called says what is wrong
            return self._given(result[0]), result[1]


def shared(
    layer: nn.Module, sharing: LayerSharing, group: TensorGroup, original: nn.Module
) -> nn.Module:
    """Make a copy of a layer a member's own; its parameters must be parts already.

    Args:
        layer: changed, and given back.
        original: the user's, with whole parameters.
    """
    recorded = sharing.recorded
    is_recorded = isinstance(layer, CapturedLayer) and (bool(sharing.inner) or recorded is not None)
    around = WHOLE if is_recorded else cast(Layout, sharing.reads)
    region = (RecordedRegion if is_recorded else Region)(sharing.name)
    for path, module in [*layer.named_modules()]:
        way = sharing.inner.get(path) if path else sharing.own
        name = f"{sharing.name}.{path}" if path else sharing.name
        gives = WHOLE if way is None else way.features
        if way is not None and way.adds:
            scatters = recorded is not None and path in recorded.rows
            gives = SEQUENCE if scatters else WHOLE if is_recorded else cast(Layout, sharing.gives)
        membership = Membership(group, name, region, around, gives)
        if way is not None:
            _become(module, way.kind, membership)
        elif isinstance(module, DROPOUTS):
            of_numbers = isinstance(module, nn.Dropout)
            is_taken = isinstance(module, GroupMember)
            own = _another(module, path, layer) if is_taken else module
            _become(own, ShardDropout if of_numbers else ShardChannelDropout, membership)
        elif sharing.inner and module._parameters:
            _become(module, UndividedModule, membership)
    if not sharing.is_plain:
        kind = type(layer)
        outside = SlicedLayer if hasattr(kind, "forward_slice") else SharedLayer
        layer.__class__ = type(kind.__name__, (outside, kind), {})
        outer = cast(SharedLayer, layer)
        outer.sharing, outer.sharers, outer.region = sharing, group, region
        outer.first_run = FirstRun(original, due=not is_recorded and _is_unknown(original, sharing))
    if is_recorded:
        cast(CapturedLayer, layer).rewrite(
            lambda graph: for_member(graph, original.get_submodule, sharing.inner, group, recorded)
        )
    return layer


def _is_unknown(layer: nn.Module, sharing: LayerSharing) -> bool:
    """Whether nobody knows that a layer of parts computes what the whole one does: all but torch's
    own modules, which were looked at, where they do not see some positions only."""
    own = type(layer).__module__.startswith("torch.nn.modules") and not [*layer.children()]
    if own and sharing.reads != SEQUENCE:
        return False
    return bool(sharing.inner) or sharing.own is not None or sharing.reads is not WHOLE


def _another(dropout: nn.Module, path: str, layer: nn.Module) -> nn.Module:
    """A dropout for one layer, in the place of one that an earlier layer calls, too, and that is a
    member's already: it draws where its own layer is."""
    own = copy(dropout)
    own.__class__ = type(dropout).__bases__[1]
    layer.set_submodule(path, own)
    return own


def _become(module: nn.Module, kind: type[GroupMember], membership: Membership) -> None:
    own = type(module)
    module.__class__ = type(own.__name__, (kind, own), {})
    cast(GroupMember, module).membership = membership


def cut_tensors(layer: nn.Module, sharing: LayerSharing) -> Iterator[tuple[Tensor, ShardSpec]]:
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
                yield bias, ShardSpec(0)


def terms(layer: nn.Module, sharing: LayerSharing) -> Iterator[Tensor]:
    """The parameters of a layer that all members repeat, each with one term of the gradient."""
    cut = {id(tensor) for tensor, _ in cut_tensors(layer, sharing)}
    if sharing.recorded is not None:
        modules = map(layer.get_submodule, sorted(sharing.recorded.terms))
        every = (parameter for module in modules for parameter in module.parameters())
        yield from (parameter for parameter in every if id(parameter) not in cut)
        return
    # What a divided layer has besides is added behind a sum, where the output lies.
    lies = sharing.reads if sharing.own is None else sharing.gives
    if lies is not WHOLE:
        yield from (parameter for parameter in layer.parameters() if id(parameter) not in cut)
        return
    for path, way in sharing.inner.items():
        if way.alike:
            yield from layer.get_submodule(path).parameters()
