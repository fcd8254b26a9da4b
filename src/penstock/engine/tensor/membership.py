"""Membership: what a module that members share knows of the group, and how it is shared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor, nn

from penstock.base.errors import ModelError
from penstock.engine.model.randomness import current_stream
from penstock.engine.tensor.group import ShardSpec, TensorGroup
from penstock.engine.tensor.layouts import FEATURES, WHOLE, Layout, as_copies


class Region:
    """Where the forward of a layer is: between a module that divides its outputs (``column``) and
    the one that takes them up (``row``), values lie by features.

    In there a module with parameters that nobody divides would get a term of its gradient and take
    it for the sum. And what draws random numbers for a part of a value, by features or by rows,
    would draw the same for different parts, unless it draws for the whole value as ``ShardDropout``
    does. So both are told by where they are called, not by what they are called.

    Attributes:
        inside: whether it is there.
        lies: along which dimension values are divided there, as far as the module tells that has
            divided them.
        open: whether the layer's forward is running.
    """

    def __init__(self, layer: str) -> None:
        self.inside = False
        self.lies: Layout = FEATURES
        self.open = False
        self._layer = layer
        self._divided = False
        self._drew = self._before = False
        self._copies: tuple[Tensor, int, Tensor] | None = None

    @contextmanager
    def opened(self, *, divided: bool) -> Iterator[None]:
        """A context in which the forward of the layer runs; it says when it has come to its
        ``end``.

        Args:
            divided: whether it has a part of its rows, or positions.
        """
        self.inside, self._divided, self._drew = False, divided, False
        stream = current_stream()
        if stream is not None:
            self._before, stream.drew = stream.drew, False
        self.open = True
        try:
            yield
        finally:
            self.open, self._copies = False, None

    def copies(self, value: Tensor, around: Layout, group: TensorGroup) -> Tensor:
        """A value as a reader wants it that divides its outputs. Several in a row, as queries, keys
        and values, read the same: it is brought together once, and so is its gradient.

        Args:
            around: the layout in which it comes.
        """
        if self._copies is not None:
            source, version, copies = self._copies
            if source is value and version == value._version:
                return copies
        copies = as_copies(value, around, group)
        if self.open:
            self._copies = value, value._version, copies
        return copies

    def enter(self, lies: Layout = FEATURES) -> None:
        """A module has divided its outputs, along a dimension."""
        self.check()
        self.inside, self.lies = True, lies

    def leave(self) -> None:
        """Values lie as they do around."""
        self.check()
        self.inside = False

    def drawn(self) -> None:
        """Random numbers drawn since ``check`` were meant for this part."""
        stream = current_stream()
        if stream is not None:
            self._drew, stream.drew = True, False

    def end(self) -> None:
        """The forward of the layer has ended."""
        self.leave()
        stream = current_stream()
        if stream is not None:
            stream.drew = self._before or self._drew

    def check(self) -> None:
        """Look at what has been drawn so far.

        Raises:
            ModelError: something has drawn random numbers for a part.
        """
        stream = current_stream()
        if stream is None or not stream.drew:
            return
        if self.inside:
            raise ModelError(
                f"layer {self._layer!r} draws random numbers where each tensor rank has its part "
                'of the features, between a "column" split and the "row" split behind it, so that '
                "different features would be dropped alike; drop out with an nn.Dropout that is "
                'split as "features" or "heads" (attention: its weights), or behind the row'
            )
        if self._divided:
            raise ModelError(
                f"layer {self._layer!r} draws random numbers for its tensor rank's rows, which "
                "would not be those of one device; drop out with an nn.Dropout, which draws for "
                'all of them, or let all tensor ranks repeat the layer (split "whole")'
            )
        self.drawn()


class RecordedRegion(Region):
    """Of a layer whose code knows itself where values are divided (``recorded_writer``)."""

    def copies(self, value: Tensor, around: Layout, group: TensorGroup) -> Tensor:
        return value

    def enter(self, lies: Layout = FEATURES) -> None:
        self.check()


@dataclass(frozen=True)
class Membership:
    """How a module is shared.

    Attributes:
        group: with whom.
        name: of the module, for errors.
        region: of its layer.
        around: the layout of the layer in which it is, outside of regions.
        gives: the layout of its output.
    """

    group: TensorGroup
    name: str
    region: Region
    around: Layout = WHOLE
    gives: Layout = WHOLE

    def copies(self, value: Tensor) -> Tensor:
        """A value that comes as it lies around, whole, for a module that divides its outputs."""
        return self.region.copies(value, self.around, self.group)


class GroupMember:
    """The base, beside ``nn.Module``, of all modules that members of a group share."""

    membership: Membership


class UndividedModule(GroupMember, nn.Module):
    """A module whose parameters nobody divides: it must not be called where values lie by
    features."""

    def forward(self, *args: object, **kwargs: object) -> object:
        """As its own class, outside of regions.

        Raises:
            ModelError: it is called between a ``column`` and a ``row``.
        """
        if self.membership.region.inside:
            name = self.membership.name
            raise ModelError(
                f"{name!r} ({type(self).__bases__[-1].__name__}) is called where each tensor rank "
                'has its part of the features: between a "column" split and the "row" split behind '
                f'it. Say how its values lie there: split {name!r} as "heads" if it treats every '
                'head alike, or as "features" if each feature has its own parameter'
            )
        return super().forward(*args, **kwargs)


@dataclass(frozen=True)
class ModuleSharing:
    """How members share one module.

    Attributes:
        kind: the class that a member's copy becomes, before its own.
        cuts: how parameters and buffers are divided, by their names in the module.
        features: along which dimension its divided values lie; ``None`` where none do.
        adds: whether outputs are sums over the members, in a layout that is to be chosen.
        alike: whether parameters are repeated, and each member's gradient is a term of a sum.
        bias: the name of a parameter that is added behind the sum, in its layout.
        pieces: what is divided, if that cannot be any number: heads, of which every member needs
            one.
        even: whether each member must have as many pieces.
    """

    kind: type[GroupMember]
    cuts: Mapping[str, ShardSpec] = field(default_factory=dict)
    features: Layout = None
    adds: bool = False
    alike: bool = False
    bias: str = ""
    pieces: int = 0
    even: bool = False
