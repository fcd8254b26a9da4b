"""What a module knows of the group that shares it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from penstock.errors import ModelError
from penstock.tensor.group import Group
from penstock.tensor.layouts import WHOLE, Layout


@dataclass
class Region:
    """Where the forward of a layer is: between a module that divides its outputs (``column``) and
    the one that takes them up (``row``), values lie by features.

    In there a module with parameters that nobody divides would get a term of its gradient and take
    it for the sum, and dropout would draw the same mask for different features. So both are told
    apart by where they are called, not by what they are called.
    """

    inside: bool = False


@dataclass(frozen=True)
class Membership:
    """How a module is shared.

    Attributes:
        group: with whom.
        name: of the module, for errors.
        around: the layout of the layer in which it is, outside of regions.
        gives: the layout of its output.
        region: of its layer.
    """

    group: Group
    name: str
    around: Layout = WHOLE
    gives: Layout = WHOLE
    region: Region = field(default_factory=Region)


class Member:
    """What all modules have that members of a group share, beside ``nn.Module``."""

    membership: Membership


class Outside(Member, nn.Module):
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
