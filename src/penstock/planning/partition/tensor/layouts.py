"""How a group of tensor ranks can share a layer, and what its values cost to hand around.

Between two layers a value lies in a layout, as in torch's DTensor: each device has its part of the
batch (``rows``), all of it (``whole``) or its part of the features (``features``). A way to share a
layer says which layout it reads and which it gives. Where the two ends of a value disagree, a
collective goes over the group's ring; so does the gradient, on its way back. A gradient can also be
``partial``: every device has a term of the sum.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import ceil
from typing import Literal

from penstock.core.cluster import Link
from penstock.core.graph import Layer

LayerSplit = Literal["data", "column", "row", "heads", "any"]
TensorLayout = Literal["rows", "whole", "features"]
GradientLayout = Literal["rows", "whole", "features", "partial"]


@dataclass(frozen=True)
class Sharing:
    """One way for a group to share a layer.

    Attributes:
        split: what the plan calls it.
        divides: what each device has a part of: the rows, nothing (``whole``: all do the same), or
            the features and with them the parameters.
        reads: layout of the layer's inputs.
        gives: layout of its output.
        returns: how the gradients of its inputs come out.
        sums: how often terms as large as its output are added up inside the layer, in the forward
            and again in the backward.
    """

    split: LayerSplit
    divides: TensorLayout
    reads: TensorLayout
    gives: TensorLayout
    returns: GradientLayout
    sums: int = 0


# Of equally fast ways the search takes the first, so those that need less memory come first.
_DATA = Sharing("data", "rows", "rows", "rows", "rows")
_REPEATED = Sharing("any", "whole", "whole", "whole", "whole")
_POINTWISE: tuple[Sharing, ...] = (
    Sharing("any", "rows", "rows", "rows", "rows"),
    _REPEATED,
    Sharing("any", "features", "features", "features", "features"),
)
_CHANNELWISE = (_DATA, _REPEATED, _POINTWISE[2])
_COLUMN = Sharing("column", "features", "whole", "features", "partial")
_ROW: tuple[Sharing, ...] = (
    Sharing("row", "features", "features", "rows", "features"),
    Sharing("row", "features", "features", "whole", "features"),
    Sharing("row", "features", "features", "features", "features"),
)
# Each device looks up the tokens of its part of the vocabulary, and everyone adds up.
_LOOK_UP: tuple[Sharing, ...] = (
    Sharing("row", "features", "whole", "rows", "whole"),
    Sharing("row", "features", "whole", "whole", "whole"),
    Sharing("row", "features", "whole", "features", "whole"),
)

# Attention and MLP of a block: each is a column, and a row behind it.
_BY_HEADS = Sharing("heads", "features", "whole", "whole", "whole", sums=2)

_LINEAR_KINDS = {"linear", "conv1d", "conv2d", "conv3d"}
_CHANNEL_KINDS = {
    *("batchnorm1d", "batchnorm2d", "batchnorm3d"),
    *("instancenorm1d", "instancenorm2d", "instancenorm3d", "prelu"),
}
_POINTWISE_KINDS = {
    *("relu", "relu6", "leakyrelu", "elu", "gelu", "silu", "mish", "tanh", "sigmoid", "hardswish"),
    *("dropout", "dropout1d", "dropout2d", "identity", "add", "mul", "sub", "flatten", "view"),
    *("maxpool1d", "maxpool2d", "maxpool3d", "avgpool1d", "avgpool2d", "avgpool3d"),
    *("adaptiveavgpool1d", "adaptiveavgpool2d", "adaptivemaxpool2d", "size", "upsample"),
}


def ways(layer: Layer, num_ranks: int = 2) -> tuple[Sharing, ...]:
    """How a group of ``num_ranks`` can share ``layer``, told by its kind.

    Linear layers, convolutions and embeddings can divide their parameters. Layers that treat every
    feature alone (activations, dropout, pooling, sums) work in any layout, and so does attention
    without parameters, head by head. Batch normalisation takes its parameters along with its
    channels. torch's transformer blocks divide their heads, if every device has as many. Everything
    else has its rows divided or is repeated on all devices. So have grouped convolutions and what
    cannot be divided, where a kind says so; layers with tied parameters, whose other holders would
    have to divide them alike; and layers with skips, because nobody knows what is in them.
    """
    kind = kind_of(layer)
    told = layer.kind.partition("(")[2]
    # What draws for its rows only would draw other numbers than one device does.
    plain = (_REPEATED,) if "draws" in told else (_DATA, _REPEATED)
    if layer.shared_parameters or layer.skip_bytes or "groups=" in told or "undivided" in told:
        return plain
    if kind in _LINEAR_KINDS:
        return (_DATA, _COLUMN, *_ROW, _REPEATED)
    if kind == "embedding":
        return (_DATA, _COLUMN, *_LOOK_UP, _REPEATED)
    alone = not layer.parameter_bytes and (kind in _POINTWISE_KINDS or "attention" in kind)
    if alone or kind in _CHANNEL_KINDS:
        return _POINTWISE if alone else _CHANNELWISE
    heads = re.match(r"heads=(\d+)", told) if kind == "transformerencoderlayer" else None
    if heads is not None and int(heads[1]) % num_ranks == 0:
        return (*plain, _BY_HEADS)
    return plain


def kind_of(layer: Layer) -> str:
    """The bare kind: ``linear`` for ``Linear(in_features=8, out_features=8)``."""
    return layer.kind.split("(")[0].strip().lower().replace("_", "")


@dataclass(frozen=True)
class Traffic:
    """What communication takes: seconds, and bytes that each device sends."""

    seconds: float = 0.0
    num_bytes: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.seconds + other.seconds, self.num_bytes + other.num_bytes)


NOTHING = Traffic()


@dataclass(frozen=True)
class Ring:
    """A group of devices that share layers.

    Attributes:
        num_ranks: how many devices there are, at least 1.
        link: what joins any two of them.
        num_rows: rows of a microbatch; a device has ``ceil(num_rows / num_ranks)`` of them at most.
    """

    num_ranks: int
    link: Link
    num_rows: int

    def share(self, layout: TensorLayout) -> float:
        """The part of a value, or of the work on it, that the busiest device has."""
        if layout == "whole":
            return 1.0
        if layout == "features":
            return 1 / self.num_ranks
        return ceil(self.num_rows / self.num_ranks) / self.num_rows

    def parameter_share(self, sharing: Sharing) -> float:
        """The part of a layer's parameters that a device has."""
        return self.share("features") if sharing.divides == "features" else 1.0

    def convert(self, have: GradientLayout, want: TensorLayout, num_bytes: float) -> Traffic:
        """Bring a value from one layout into another.

        From a part to the whole is an all-gather, from a partial sum to the whole an all-reduce, to
        a part of it a reduce-scatter, from rows to features or back an all-to-all. Taking a part of
        the whole costs nothing.

        Args:
            have, want: the layouts.
            num_bytes: of the whole value.
        """
        if have in (want, "whole") or not num_bytes or self.num_ranks == 1:
            return NOTHING
        if have == "partial":
            if want == "whole":
                return self.all_reduce(num_bytes)
            return self._steps(self._others(want, num_bytes))
        if want == "whole":
            return self._steps(self._others(have, num_bytes))
        # Of its part by one measure, a device keeps its part by the other.
        away = (self.num_ranks - 1) / self.num_ranks
        return self._steps(away * self.share("rows") * num_bytes)

    def all_reduce(self, num_bytes: float) -> Traffic:
        """Sum a value over the ring: 2(t-1)/t of its bytes pass every link, in 2(t-1) steps."""
        if not num_bytes or self.num_ranks == 1:
            return NOTHING
        half = self._steps((self.num_ranks - 1) / self.num_ranks * num_bytes)
        return half + half

    def _others(self, layout: GradientLayout, num_bytes: float) -> float:
        """The parts of all other devices; uneven ones are no more than everything."""
        part = self.share("rows" if layout == "rows" else "features")
        return min((self.num_ranks - 1) * part, 1.0) * num_bytes

    def _steps(self, num_bytes: float) -> Traffic:
        waits = (self.num_ranks - 2) * self.link.latency_seconds
        return Traffic(waits + self.link.seconds(num_bytes), num_bytes)
