"""In which layout every value of a chain of layers lies.

Walked once from the first layer to the last: each reads its input in the layout that its split
says, or in the one that the value has. A layer whose outputs are summed over the members can give
them in any layout; it gives what the next reader wants, as the planner's costs assume.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from penstock.base.errors import ModelError
from penstock.engine.model.spine import NamedLayer
from penstock.engine.tensor.attention import by_heads, is_block
from penstock.engine.tensor.divided_layers import RowEmbedding
from penstock.engine.tensor.layouts import (
    CHANNELS,
    FEATURES,
    ROWS,
    SEQUENCE,
    WHOLE,
    Layout,
    Layouts,
)
from penstock.engine.tensor.membership import ModuleSharing
from penstock.engine.tensor.recorded import layouts_of
from penstock.engine.tensor.recorded_writer import RecordedLayouts
from penstock.engine.tensor.splits import (
    channels,
    has_batch_statistics,
    mixes_features,
    sharing_of,
    sharings_of,
    works_on_channels,
    works_on_features,
)
from penstock.engine.tracing.layers import CapturedLayer

_DIVIDING = {"data": ROWS, "sequence": SEQUENCE, "whole": WHOLE}


@dataclass(frozen=True)
class LayerSharing:
    """How members share one layer.

    Attributes:
        name: of the layer.
        have: in which layout its input comes.
        reads: in which it is wanted.
        gives: in which the output comes out.
        leaves: in which it leaves.
        own: how the layer itself is divided, if it is.
        inner: how modules in it are, by their names in the layer.
        recalls: in which layouts skips come, by their keys.
        said: what splits say of the layer (by ``""``) and of modules in it, for errors.
        recorded: where values lie in a captured layer, if not all that it reads and gives is whole.
    """

    name: str
    have: Layouts
    reads: Layouts
    gives: Layouts
    leaves: Layouts
    own: ModuleSharing | None = None
    inner: Mapping[str, ModuleSharing] = field(default_factory=dict)
    recalls: Mapping[str, Layouts] = field(default_factory=dict)
    said: Mapping[str, str] = field(default_factory=dict)
    recorded: RecordedLayouts | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the layer runs as on one device: on whole values, with whole parameters."""
        layouts = {self.have, self.reads, self.gives, self.leaves, *self.recalls.values()}
        return layouts == {WHOLE} and not self.inner


def walk(
    layers: Sequence[NamedLayer],
    splits: Sequence[str],
    inner: Sequence[Mapping[str, str]],
    sizes: Sequence[int],
) -> list[LayerSharing]:
    """How members share every layer of a model.

    Args:
        layers: of the whole model.
        splits: how each is split: ``"data"``, ``"sequence"``, ``"column"``, ``"row"``,
            ``"vocabulary"``, ``"features"``, ``"any"`` or ``"whole"``.
        inner: how modules inside each of them are, by their names in the layer.
        sizes: how many members the group has that runs each of them; between two groups, a value
            keeps its layout.

    Raises:
        ModelError: a layer cannot be split so.
    """
    walked: list[LayerSharing] = []
    skips: dict[str, Layouts] = {}
    have: Layouts = WHOLE
    uneven = False
    for index, layer in enumerate(layers):
        wanted = _wanted(layers, splits, index + 1)
        split, alone = splits[index], sizes[index] == 1
        if alone:
            have = WHOLE  # one that has everything has every part
        if uneven and have == CHANNELS and isinstance(layer.module, nn.Flatten):
            split = "whole"  # behind it, parts of features would be other ones than of channels
        is_last = index == len(layers) - 1
        sharing = _shared(layer, split, inner[index], (have, wanted), sizes[index], is_last)
        _check_pieces(sharing, sizes[index])
        channels_out = getattr(layer.module, "out_channels", None)
        uneven = uneven if channels_out is None else channels_out % sizes[index] != 0
        taken = {key: skips.pop(key) for key in layer.recalls}
        recalled = dict.fromkeys(taken, WHOLE) if alone else taken
        skips |= dict.fromkeys(layer.stashes, sharing.gives)
        said = {"": splits[index], **inner[index]}
        leaves = _leaves(layer, sharing, said, sizes[index:])
        sharing = replace(sharing, leaves=leaves, recalls=recalled, said=said)
        walked.append(sharing)
        have = sharing.leaves
    return walked


def _leaves(
    layer: NamedLayer, sharing: LayerSharing, said: Mapping[str, str], sizes: Sequence[int]
) -> Layouts:
    """In which layout a layer's output leaves.

    Args:
        said: how it, and modules in it, are split.
        sizes: of the groups that run it and those behind it.

    Raises:
        ModelError: a loss is to be computed on parts of what is not the model's output.
    """
    heads = [path for path, how in said.items() if how == "vocabulary"]
    if heads and len(sizes) > 1:
        raise ModelError(
            f"{layer.key(heads[0]) if heads[0] else layer.name!r} is split as 'vocabulary', so "
            "that the loss is computed on parts of what it gives, but other layers come behind "
            f'{layer.name!r}; split it as "column"'
        )
    if len(sizes) == 1:
        last = sharing.leaves if sharing.recorded else FEATURES
        return last if heads and sizes[0] > 1 else WHOLE
    is_uneven = isinstance(sharing.leaves, tuple) and sizes[0] != sizes[1]
    return WHOLE if is_uneven else sharing.leaves


def _shared(
    layer: NamedLayer,
    split: str,
    inner: Mapping[str, str],
    between: tuple[Layouts, Layout],
    size: int,
    is_last: bool,
) -> LayerSharing:
    module, name = layer.module, layer.name
    have, wanted = between
    _check_skips(layer, split)
    is_written_anew = inner or split == "sequence" or split not in (*_DIVIDING, "any")
    if isinstance(module, CapturedLayer) and (is_written_anew or _is_cut(module, split, wanted)):
        return _recorded(layer, module, split, inner, between, size, is_last)
    if split == "any":
        return _following(name, module, have, size)
    if split in _DIVIDING:
        works = _DIVIDING[split]
        if works is not WHOLE and has_batch_statistics(module):
            works = WHOLE  # its rows are normalised together, on one device
        ways = _inner_sharings(layer, inner)
        if works == SEQUENCE:
            _check_positions(layer, ways)
        _check_taken_up(layer, ways)
        return LayerSharing(name, have, works, works, works, inner=ways)
    if inner:
        raise ModelError(
            f"layer {name!r} is split as {split!r} itself, so that {next(iter(inner))!r} in it "
            'cannot be split, too; split the layer as "whole", "data" or "sequence"'
        )
    return _by_itself(name, module, split, have, wanted, size)


def _by_itself(
    name: str, module: nn.Module, split: str, have: Layouts, wanted: Layout, size: int
) -> LayerSharing:
    """A layer that is divided itself, and not by modules in it."""
    if "/" in split:
        raise ModelError(
            f"layer {name!r} is split as {split!r}, but what lies behind a layer must be one part "
            f'of its features; split modules inside a layer so, or take "column"'
        )
    if split == "heads" and is_block(module):
        return LayerSharing(name, have, WHOLE, WHOLE, WHOLE, inner=by_heads(module, name))
    if split == "features":
        return _by_features(name, module, have, size)
    if split == "heads":
        raise ModelError(
            f"layer {name!r} ({type(module).__name__}) is split as 'heads', which is for modules "
            "inside a layer, and for torch's blocks of transformers as a whole; name the attention "
            'in it, or let all tensor ranks repeat the layer ("whole")'
        )
    own = sharing_of(module, split, name)
    if not own.adds:
        reads = WHOLE if isinstance(module, nn.Embedding) else have
        return LayerSharing(name, have, reads, own.features, own.features, own)
    reads = WHOLE if isinstance(module, nn.Embedding) else own.features
    return LayerSharing(name, have, reads, wanted, wanted, own)


def _by_features(name: str, module: nn.Module, have: Layouts, size: int) -> LayerSharing:
    """A layer that takes its part of the features, or channels, and gives it."""
    own = sharing_of(module, "features", name)
    if mixes_features(module, size):
        raise ModelError(
            f"layer {name!r} ({type(module).__name__}) cannot be split as 'features': it does not "
            'treat every feature by itself; let all tensor ranks repeat it ("whole") or take their '
            'rows ("data")'
        )
    lies = own.features
    if lies is WHOLE:  # it has no parameters, and works on either
        lies = CHANNELS if have == CHANNELS else FEATURES
    return LayerSharing(name, have, lies, lies, lies, own)


def _recorded(
    layer: NamedLayer,
    module: CapturedLayer,
    split: str,
    inner: Mapping[str, str],
    between: tuple[Layouts, Layout],
    size: int,
    is_last: bool,
) -> LayerSharing:
    """A layer of a captured model, in which modules are split. Named as one of them is, it reads
    positions as they come, and gives them as they are wanted."""
    name, (have, wanted) = layer.name, between
    by_positions = split == "sequence" or _is_cut(module, split, wanted)
    if split not in (*_DIVIDING, "any"):
        comes_divided = isinstance(have, tuple) and SEQUENCE in have
        by_positions = comes_divided or wanted == SEQUENCE
        inner, split = {**inner, name: split}, "whole"
    if split == "data":
        raise ModelError(
            f"layer {name!r} of a captured model is split as {split!r}, and modules in it are "
            "split, too; its code was recorded for whole values, so leave one of the two out"
        )
    uncalled = [path for path in inner if path not in module.calls]
    if uncalled:
        raise ModelError(
            f"layer {name!r} of a captured model calls no module {uncalled[0]!r} that could be "
            f"split as {inner[uncalled[0]]!r}; it calls {', '.join(sorted(module.calls)) or 'none'}"
        )
    ways = _inner_sharings(layer, inner)
    has_head = "vocabulary" in inner.values()
    if size == 1 or not (has_head or by_positions):
        return LayerSharing(name, have, WHOLE, WHOLE, WHOLE, inner=ways)
    keeps = FEATURES if has_head else WHOLE if is_last or not by_positions else SEQUENCE
    try:
        own = layouts_of(module, ways, size, have, by_positions=by_positions, keeps=keeps)
    except ModelError as error:
        raise ModelError(f"layer {name!r} cannot be split as {split!r}: {error}") from error
    return LayerSharing(name, have, own.reads, own.gives, own.gives, inner=ways, recorded=own)


def _is_cut(module: CapturedLayer, split: str, wanted: Layout) -> bool:
    """Whether a captured layer looks up whole what those behind it read by positions: it is cut
    where it has been looked up, since nobody behind it could tell it from a mask."""
    looks_up = any(isinstance(module.get_submodule(path), nn.Embedding) for path in module.calls)
    return looks_up and wanted == SEQUENCE and split in ("any", "whole")


def _check_positions(layer: NamedLayer, ways: Mapping[str, ModuleSharing]) -> None:
    """Raise ``ModelError`` where a module of torch's mixes positions of which members have some."""
    for path, module in layer.module.named_modules():
        if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)) and path not in ways:
            name = layer.key(path) if path else layer.name
            raise ModelError(
                f"layer {layer.name!r} is split as 'sequence', so that each tensor rank has some "
                f"of its positions, but {name!r} in it ({type(module).__name__}) mixes positions: "
                f'split it, too (attention: "{name}": "heads"), or let all tensor ranks repeat the '
                'layer ("whole") or take their rows ("data")'
            )


def _inner_sharings(layer: NamedLayer, inner: Mapping[str, str]) -> dict[str, ModuleSharing]:
    """By their names in a layer, how modules are shared that are split, or whose parents are."""
    ways: dict[str, ModuleSharing] = {}
    said: dict[str, str] = {}
    for path, how in inner.items():
        name = layer.key(path)
        for below, own in sharings_of(layer.module.get_submodule(path), how, name).items():
            key = f"{path}.{below}" if below else path
            if key in ways:
                raise ModelError(
                    f"splits say twice how {layer.key(key)!r} is split: for itself and with "
                    f"{said[key] if said[key] != layer.key(key) else name!r}; leave one of them out"
                )
            ways[key], said[key] = own, name
    return ways


def _check_taken_up(layer: NamedLayer, ways: Mapping[str, ModuleSharing]) -> None:
    """Raise ``ModelError`` for a ``row`` in a layer in which nothing divides features for it."""
    divides = any(own.cuts and own.features is not WHOLE and not own.adds for own in ways.values())
    rows = [path for path, own in ways.items() if own.adds and own.kind is not RowEmbedding]
    if rows and not divides:
        raise ModelError(
            f'{layer.key(rows[0])!r} is split as "row", so it takes up the part of the features '
            f"that each tensor rank has, but nothing in layer {layer.name!r} divides them: split "
            'a module before it as "column", or leave this one out of the splits'
        )


def _check_pieces(sharing: LayerSharing, size: int) -> None:
    """Raise ``ModelError`` where members would have nothing, or not as much as they must."""
    ways = {**sharing.inner, **({} if sharing.own is None else {"": sharing.own})}
    for path, own in ways.items():
        name = f"{sharing.name}.{path}" if path else sharing.name
        if own.pieces and (own.pieces < size or (own.even and own.pieces % size)):
            need = "each needs as many" if own.even else "each needs at least one"
            raise ModelError(
                f"{name!r} has {own.pieces} heads or groups for {size} tensor ranks, but {need}; "
                'let all tensor ranks repeat it ("whole") or take their rows ("data")'
            )


def _check_skips(layer: NamedLayer, split: str) -> None:
    if (layer.stashes or layer.recalls) and split not in _DIVIDING:
        raise ModelError(
            f"layer {layer.name!r} has skips, which pass whole or by rows only; split it as "
            f'"whole" or "data", not {split!r}'
        )


def _following(name: str, module: nn.Module, have: Layouts, size: int) -> LayerSharing:
    """A layer that is split as ``"any"``: it takes its values as they come, if it can."""
    own = None
    works = WHOLE if isinstance(have, tuple) else have
    if have == ROWS:
        works = WHOLE if has_batch_statistics(module) else ROWS
    elif have == FEATURES:
        works = FEATURES if works_on_features(module) else WHOLE
    elif works is not WHOLE:
        works = works if works_on_channels(module, size) else WHOLE
    if works == CHANNELS:
        own = channels(module)
    return LayerSharing(name, have, works, works, works, own)


def _wanted(layers: Sequence[NamedLayer], splits: Sequence[str], index: int) -> Layout:
    """In which layout the next reader that does not take values as they come wants its input."""
    for layer, split in zip(layers[index:], splits[index:], strict=True):
        if split == "row" and not isinstance(layer.module, (nn.Embedding, CapturedLayer)):
            return sharing_of(layer.module, split, layer.name).features
        if split == "any":
            if works_on_features(layer.module):
                continue
            return WHOLE
        return _DIVIDING.get(split, WHOLE)
    return WHOLE
