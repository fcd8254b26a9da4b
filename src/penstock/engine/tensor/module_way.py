"""``Way``: how members share one module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.engine.tensor.cuts import Cut
from penstock.engine.tensor.layouts import Layout
from penstock.engine.tensor.membership import Member


@dataclass(frozen=True)
class Way:
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

    kind: type[Member]
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    features: Layout = None
    adds: bool = False
    alike: bool = False
    bias: str = ""
    pieces: int = 0
    even: bool = False
