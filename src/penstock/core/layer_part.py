"""``LayerPart``: a part of a layer that tensor ranks can divide among themselves."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Literal

from msgspec.structs import replace

from penstock.base.errors import InputError
from penstock.base.values import MOST_BYTES, Value, shown, whole

PartKind = Literal["attention", "mlp", "embedding", "head", "block", "declared"]


class LayerPart(Value, frozen=True, kw_only=True):
    """A part of a layer with modules that divide features, and, but for a head, one that takes them
    up and sums: attention by heads, an MLP by hidden features, an embedding by its vocabulary, a
    head by its outputs, a block of torch's by the heads of its attention. Bytes and shares are
    those of one device that has all of it.

    Attributes:
        kind: of the part; ``"declared"`` where the model's author has named its modules.
        splits: how its modules are split, by their names in the model, as a plan says it.
        pieces: what is divided, in number: heads, hidden features, vocabulary.
        key_value_heads: of an attention; fewer than ``pieces`` where queries share them, 0 of all
            else.
        num_sums: how often it reads a whole value, and sums one.
        gated: whether an MLP has two columns, of which one gates the other.
        is_even: whether each rank must have as many pieces.
        by_positions: whether each rank may have some of the positions of what is around the parts
            of the layer, as its author says.
        tied: names of the parameters in it that a part of another layer holds as well, and divides
            alike: an embedding and a head, by the vocabulary.
        parameter_bytes: of weights that are divided.
        activation_bytes: of what the layer keeps, what is divided; of a head with all of the loss.
        border_bytes: of the value that it reads.
        output_bytes: of the one that it gives.
        forward_share: of the layer's forward, what is divided.
    """

    kind: PartKind
    splits: dict[str, str]
    pieces: int
    key_value_heads: int = 0
    num_sums: int = 1
    gated: bool = False
    is_even: bool = False
    by_positions: bool = False
    tied: tuple[str, ...] = ()
    parameter_bytes: int = 0
    activation_bytes: int = 0
    border_bytes: int = 0
    output_bytes: int = 0
    forward_share: float = 0.0

    def __post_init__(self) -> None:
        self.check_fields("part")
        whole("part: pieces", self.pieces, 1, MOST_BYTES)
        if not self.splits:
            raise InputError(f"part: {shown(self.kind)} names no module that is split")
        if not 0 <= self.forward_share <= 1:
            raise InputError(f"part: forward_share is {self.forward_share}, but must be 0 to 1")

    def renamed(self, text: Callable[[str], str]) -> LayerPart:
        """The part of a layer whose modules have other names."""
        return replace(self, splits={text(name): how for name, how in self.splits.items()})

    def refusal(self, num_ranks: int) -> str:
        """Why so many tensor ranks cannot share the part, in words; empty if they can."""
        if self.key_value_heads and self.key_value_heads % num_ranks:
            return f"it has {self.key_value_heads} heads of keys and values"
        if self.is_even and self.pieces % num_ranks:
            return f"it has {self.pieces} heads" if self.kind == "attention" else (
                f"it has {self.pieces} pieces"
            )  # fmt: skip
        return "" if self.pieces >= num_ranks else f"it has {self.pieces} features"

    def share(self, num_ranks: int) -> float:
        """The share of the part that the busiest of so many ranks has."""
        return ceil(self.pieces / num_ranks) / self.pieces
