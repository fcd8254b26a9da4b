"""Splits: which modules their keys mean, and how each of these can be divided.

A key is the name of a layer, or a pattern of modules inside layers. A module is divided in some of
its parameters, and its copy on a member becomes another class.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import nn

from penstock.base.errors import ModelError
from penstock.engine.model.spine import NamedLayer
from penstock.engine.tensor.attention import COLUMN, ROW, ModuleSharings, by_heads
from penstock.engine.tensor.divided_layers import (
    DROPOUTS,
    FEATURE_DROPOUTS,
    ChannelNorm,
    ColumnConv,
    ColumnEmbedding,
    ColumnTransposed,
    RowConv,
    RowEmbedding,
    RowTransposed,
    ShardChannelDropout,
    ShardDropout,
    ShardGroupNorm,
    ShardInstanceNorm,
    is_transposed,
)
from penstock.engine.tensor.group import ShardSpec
from penstock.engine.tensor.layouts import CHANNELS, FEATURES
from penstock.engine.tensor.membership import GroupMember, ModuleSharing
from penstock.engine.tracing.layers import CapturedLayer


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern means a name; ``*`` stands for anything between two dots.

    >>> matches("blocks.*.mlp.0", "blocks.11.mlp.0"), matches("blocks.*", "blocks.11.mlp.0")
    (True, False)
    """
    wanted, given = pattern.split("."), name.split(".")
    return len(wanted) == len(given) and all(map(fnmatchcase, given, wanted))


def inner_splits(layer: NamedLayer, splits: Mapping[str, str]) -> dict[str, str]:
    """How modules inside a layer are split, by their names in it.

    Args:
        splits: by patterns of qualified names.

    Raises:
        ModelError: two patterns say different things of one module.
    """
    inner: dict[str, str] = {}
    for path, _ in layer.module.named_modules():
        if not path:
            continue
        said = _said(named(layer, path), splits)
        if said not in ("", "whole", "any"):
            inner[path] = said
    return inner


def own_split(layer: NamedLayer, splits: Mapping[str, str]) -> str:
    """How a layer itself is split: by its name, or else by a pattern; ``"whole"`` if none says."""
    return splits.get(layer.name) or _said(layer.name, splits) or "whole"


def _said(name: str, splits: Mapping[str, str]) -> str:
    said = {how for pattern, how in splits.items() if matches(pattern, name)}
    if len(said) > 1:
        both = " and ".join(map(repr, sorted(said)))
        raise ModelError(f"splits say {both} of {name}; let only one pattern mean it")
    return said.pop() if said else ""


def named(layer: NamedLayer, path: str) -> str:
    """The name of a module of a layer in splits. Layers of a captured model hold modules under the
    names that these have in the model."""
    return path if isinstance(layer.module, CapturedLayer) else f"{layer.name}.{path}"


def check_used(stages: Iterable[tuple[Sequence[NamedLayer], Mapping[str, str]]]) -> None:
    """Raise ``ModelError`` for a key that means no module of any stage that has it.

    Args:
        stages: the layers of each, and its splits.
    """
    names_of: dict[str, list[str]] = {}
    for layers, splits in stages:
        names = [
            named(layer, path) if path else layer.name
            for layer in layers
            for path, _ in layer.module.named_modules()
        ]
        for pattern in splits:
            names_of.setdefault(pattern, []).extend(names)
    for pattern, names in names_of.items():
        if not any(matches(pattern, name) for name in names):
            raise ModelError(
                f"splits: {pattern!r} means no layer and no module of these layers; they have "
                f"{', '.join(map(repr, names[:8]))}{' …' if len(names) > 8 else ''}"
            )


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_STATISTICS = ("weight", "bias", "running_mean", "running_var")

BY_ELEMENT: tuple[type[nn.Module], ...] = (
    nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU,
    nn.Mish, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid,
    nn.LogSigmoid, nn.Softsign,
)  # fmt: skip
"""Modules that treat every number by itself, and so work on any part."""

BY_CHANNEL: tuple[type[nn.Module], ...] = (
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d, nn.Upsample, nn.ZeroPad2d, nn.PixelShuffle,
)  # fmt: skip
"""Modules that treat every row and channel by itself, where both are dimensions."""


def sharings_of(module: nn.Module, split: str, name: str) -> ModuleSharings:
    """As ``sharing_of``, for a module and those in it that are split with it."""
    known = by_heads(module, name) if split == "heads" else {}
    return known or {"": sharing_of(module, split, name)}


def sharing_of(module: nn.Module, split: str, name: str) -> ModuleSharing:
    """How members share a module that is split so.

    Args:
        split: ``"column"`` (``"column/3"`` where its outputs are three pieces, as queries, keys and
            values are), ``"vocabulary"`` (a column that gives logits, on parts of which the loss is
            computed), ``"row"``, ``"features"`` or ``"heads"``.
        name: of the module, for errors.

    Raises:
        ModelError: it cannot be.
    """
    bare, _, blocks = split.partition("/")
    if bare == "vocabulary":  # a column; the layer sees to what comes behind it
        if not isinstance(module, nn.Linear):
            raise _refused(
                module, split, name, "the head that gives the logits is a linear layer; repeat it"
            )
        bare = "column"
    if bare in ("features", "heads"):
        return _inside(module, bare, name)
    if is_transposed(module):
        return _transposed(int(blocks or 1), divides_outputs=bare == "column")
    if not _is_plain(module):
        raise _refused(module, split, name, _CAN_SPLIT)
    _check_plain(module, split, name)
    if bare == "column":
        made = _column(module, int(blocks or 1))
        size = _outputs(module)
        if size % int(blocks or 1):
            raise _refused(module, split, name, f"its {size} outputs are not {blocks} pieces")
        return made
    return _row(module)


_CAN_SPLIT = (
    'linear layers, embeddings and convolutions can be "column" or "row"; let all tensor ranks '
    'repeat it ("whole") or take their rows ("data")'
)


def _refused(module: nn.Module, split: str, name: str, why: str) -> ModelError:
    return ModelError(f"{name!r} ({type(module).__name__}) cannot be split as {split!r}: {why}")


def _is_plain(module: nn.Module) -> bool:
    """Whether a module is of a class whose forward we know."""
    known = (nn.Linear, nn.Embedding, *_CONVOLUTIONS)
    return any(isinstance(module, kind) and type(module).forward is kind.forward for kind in known)


def _check_plain(module: nn.Module, split: str, name: str) -> None:
    if isinstance(module, _CONVOLUTIONS) and module.groups != 1:
        raise _refused(module, split, name, "it is grouped; repeat it, or divide its rows")
    if isinstance(module, nn.Embedding):
        for argument in ("max_norm", "sparse", "scale_grad_by_freq"):
            if getattr(module, argument):
                raise _refused(module, split, name, f"it has {argument}; repeat it")
    computed = [key for key, _ in module.named_parameters() if key not in ("weight", "bias")]
    if computed or "weight" not in module._parameters:
        raise _refused(
            module, split, name, "its weight is computed (parametrised, or pruned); repeat it"
        )


def trait_of(module: nn.Module) -> str:
    """A trait beside its class that decides how a module can be divided; empty if there is none."""
    if not _is_plain(module):
        return ""
    groups = getattr(module, "groups", 1)
    if groups != 1:
        return f"groups={groups}"
    try:
        _check_plain(module, "column", "")
    except ModelError:
        return "undivided"
    return ""


def _outputs(module: nn.Module) -> int:
    if isinstance(module, nn.Embedding):
        return module.embedding_dim
    return int(module._parameters["weight"].shape[0])  # type: ignore[union-attr]


def _column(module: nn.Module, blocks: int) -> ModuleSharing:
    if isinstance(module, nn.Embedding):
        return ModuleSharing(ColumnEmbedding, {"weight": ShardSpec(1, blocks)}, FEATURES)
    cuts = {"weight": ShardSpec(0, blocks), "bias": ShardSpec(0, blocks)}
    if isinstance(module, nn.Linear):
        return replace(COLUMN, cuts=cuts)
    return ModuleSharing(ColumnConv, cuts, CHANNELS)


def _row(module: nn.Module) -> ModuleSharing:
    if isinstance(module, nn.Embedding):
        return ModuleSharing(RowEmbedding, {"weight": ShardSpec(0)}, FEATURES, adds=True)
    if isinstance(module, nn.Linear):
        return ROW
    return ModuleSharing(RowConv, {"weight": ShardSpec(1)}, CHANNELS, adds=True, bias="bias")


def _transposed(blocks: int, *, divides_outputs: bool) -> ModuleSharing:
    if divides_outputs:
        return ModuleSharing(
            ColumnTransposed,
            {"weight": ShardSpec(1, blocks), "bias": ShardSpec(0, blocks)},
            FEATURES,
        )
    return ModuleSharing(RowTransposed, {"weight": ShardSpec(0)}, FEATURES, adds=True, bias="bias")


def _inside(module: nn.Module, split: str, name: str) -> ModuleSharing:
    if isinstance(module, nn.Dropout):
        return ModuleSharing(ShardDropout, features=FEATURES if split == "features" else 1)
    if isinstance(module, FEATURE_DROPOUTS):
        return ModuleSharing(ShardChannelDropout, features=CHANNELS)
    if split == "heads":
        return ModuleSharing(GroupMember, alike=True)
    own = channels(module)
    if own is not None:
        return own
    if next(module.parameters(), None) is None:
        return ModuleSharing(GroupMember)
    raise _refused(module, split, name, "nobody knows which of its parameters belong to a feature")


def channels(module: nn.Module) -> ModuleSharing | None:
    """How members share a module with parameters or statistics for each channel; ``None`` if it has
    nothing that would have to be divided with its channels."""
    held = {**module._parameters, **module._buffers}
    cuts = {key: ShardSpec(0) for key in _STATISTICS if held.get(key) is not None}
    if isinstance(module, _BATCH_NORMS):
        return ModuleSharing(ChannelNorm, cuts, CHANNELS)
    if isinstance(module, _INSTANCE_NORMS):
        return ModuleSharing(ShardInstanceNorm, cuts, CHANNELS)
    if isinstance(module, nn.GroupNorm):
        return ModuleSharing(ShardGroupNorm, cuts, CHANNELS, pieces=module.num_groups, even=True)
    if isinstance(module, nn.PReLU) and module.num_parameters > 1:
        return ModuleSharing(GroupMember, cuts, CHANNELS)
    return None


def works_on_channels(module: nn.Module, size: int) -> bool:
    """Whether each of ``size`` members can give a module its part of the channels, or features, and
    gets such a part."""
    if isinstance(module, nn.Flatten):
        return module.start_dim == 1
    own = channels(module)
    if own is not None:
        return not own.even or own.pieces % size == 0
    return isinstance(module, (*BY_CHANNEL, *BY_ELEMENT, *DROPOUTS, nn.PReLU))


def works_on_features(module: nn.Module) -> bool:
    """Whether a module treats every number by itself."""
    return isinstance(module, (*BY_ELEMENT, nn.Dropout))


def mixes_features(module: nn.Module, size: int) -> bool:
    """Whether a module, or one in it, is a class of torch's that does not treat every channel or
    feature by itself. Of others only who has written them knows."""
    return any(
        type(part).__module__.startswith("torch.nn.modules")
        and not (works_on_channels(part, size) or works_on_features(part))
        for part in module.modules()
        if not [*part.children()]
    )


def has_batch_statistics(module: nn.Module) -> bool:
    """Whether a module's output for a row, or what it remembers, depends on other rows."""
    return any(
        isinstance(part, nn.modules.batchnorm._BatchNorm)
        or (isinstance(part, _INSTANCE_NORMS) and part.track_running_stats)
        or (isinstance(part, nn.Embedding) and part.max_norm is not None)
        for part in module.modules()
    )
