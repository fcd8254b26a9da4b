"""Recorded calls of attention over positions that members share: what a ring needs to know.

Attention goes round a ring if it is causal or sees everything, and drops nothing out. A mask may
say so that is computed from nothing but sizes (``masks``); any other is refused by name.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import fx, nn

from penstock.base.errors import ModelError
from penstock.engine.context.masks import MaskKind, NotFixedError, kind_of
from penstock.engine.context.walk import ModelWalk, refused
from penstock.engine.following.dims import ShardedDim, shape_of
from penstock.engine.tracing.graphs import leaves_of_output


class RingCall(NamedTuple):
    """A call of attention.

    Attributes:
        values: queries, keys, values.
        divided: how its output is.
        length: of the sequence where it is causal, else 0.
        scale: of the scores; the usual one with ``None``.
    """

    values: tuple[fx.Node, ...]
    divided: ShardedDim
    length: int
    scale: float | None = None


class Attending:
    """Reads the calls of attention in one layer.

    Args:
        walk: what is known of values so far.

    Attributes:
        modules: the names of torch's modules that attend.
    """

    def __init__(self, walk: ModelWalk) -> None:
        self.modules: list[str] = []
        self._walk = walk

    def operation(self, node: fx.Node) -> RingCall:
        """A call of ``scaled_dot_product_attention``.

        Raises:
            ModelError: it cannot go round a ring.
        """
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        values = tuple(given[name] for name in names[:3])
        ways = [self._walk.divided.get(value) for value in values]
        shapes = [shape_of(value) for value in values]
        if given.get("dropout_p"):
            raise self._drops(node)
        if None in ways or None in shapes:
            raise self._refused(node, "attends to what only some of its inputs share")
        for way, shape in zip(ways, shapes, strict=True):
            if way.dim != len(shape) - 2 or way.inner != 1:  # type: ignore[union-attr, arg-type]
                raise self._refused(node, "attends along another dimension than positions")
        self._check_heads(node, shapes, grouped=bool(given.get("enable_gqa")))
        kind: MaskKind = "causal" if given.get("is_causal") else "full"
        if given.get("attn_mask") is not None:
            kind = self._kind(node, given["attn_mask"], hides=False)
        length = self._length(node, kind, ways)
        return RingCall(values, ways[0], length, given.get("scale"))  # type: ignore[arg-type]

    def module(self, node: fx.Node, module: nn.MultiheadAttention) -> RingCall:
        """A call of torch's module.

        Raises:
            ModelError: it cannot go round a ring.
        """
        names = (
            "query", "key", "value", "key_padding_mask", "need_weights", "attn_mask",
            "average_attn_weights", "is_causal",
        )  # fmt: skip
        given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        values = tuple(given[name] for name in names[:3])
        if type(module).forward is not nn.MultiheadAttention.forward:
            raise self._refused(node, "has a forward of its own")
        if module.dropout:
            raise self._drops(node)
        if given.get("key_padding_mask") is not None:
            raise self._refused(node, f"has a key_padding_mask; {_MASKS}")
        if module.bias_k is not None or module.add_zero_attn:
            raise self._refused(node, "attends to a key that is at no position")
        if _asks_for_weights(node):
            raise self._refused(
                node, "is asked for its weights, which no rank has; need_weights=False"
            )
        ways = [self._walk.divided.get(value) for value in values]
        place = 1 if module.batch_first else 0
        if any(way is None or way.dim != place or way.inner != 1 for way in ways):
            raise self._refused(node, "attends along another dimension than positions")
        kind: MaskKind = "full"
        if given.get("attn_mask") is not None:
            kind = self._kind(node, given["attn_mask"], hides=True)
        self.modules.append(str(node.target))
        return RingCall(values, ways[0], self._length(node, kind, ways))  # type: ignore[arg-type]

    def _kind(self, node: fx.Node, mask: Any, *, hides: bool) -> MaskKind:
        try:
            kind = kind_of(self._walk.fixed.of(mask), hides=hides)
        except NotFixedError:
            raise self._refused(
                node, f"has a mask that depends on the model's inputs; {_MASKS}"
            ) from None
        if kind is None:
            raise self._refused(node, f"has a mask that is not the causal one; {_MASKS}")
        return kind

    def _length(self, node: fx.Node, kind: MaskKind, ways: list[ShardedDim | None]) -> int:
        lengths = [way.length for way in ways if way is not None]
        if lengths[1] != lengths[2]:
            raise self._refused(node, "has other positions of values than of keys")
        if kind == "full":
            return 0
        if lengths[0] != lengths[1]:
            raise self._refused(node, "is causal between sequences of different lengths")
        return lengths[0]

    def _check_heads(self, node: fx.Node, shapes: list[Any], *, grouped: bool) -> None:
        """Raise unless all have the same rows and heads, or heads in proportion."""
        rows = [shape[: -3 if grouped else -2] for shape in shapes]
        heads = [shape[-3] if grouped else 1 for shape in shapes]
        alike = rows[0] == rows[1] == rows[2] and heads[1] == heads[2]
        if not alike or heads[0] % heads[1]:
            raise self._refused(node, "has keys for several rows or heads at once; expand them")

    def _refused(self, node: fx.Node, why: str) -> ModelError:
        return refused(self._walk.layer, node, why)

    def _drops(self, node: fx.Node) -> ModelError:
        return self._refused(
            node,
            "drops out weights of attention, which no rank has all of; build the model with "
            "attention dropout 0",
        )


_MASKS = (
    "over positions that are shared, attention is causal (is_causal=True, or a mask computed from "
    "sizes alone) or sees everything"
)


def _asks_for_weights(node: fx.Node) -> bool:
    """Whether anybody reads the second output of torch's module."""
    for user in node.users:
        readers = user.users if user.target is leaves_of_output else {user: None}
        if any(len(reader.args) > 1 and reader.args[1] == 1 for reader in readers):
            return True
    return False
