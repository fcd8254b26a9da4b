"""What a module can be divided into: which of its parameters, and by which class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from penstock.errors import ModelError
from penstock.tensor.convolution import ColumnConv, RowConv
from penstock.tensor.cuts import Cut
from penstock.tensor.dropout import PartDropout
from penstock.tensor.embedding import ColumnEmbedding, RowEmbedding
from penstock.tensor.layouts import CHANNELS, FEATURES, Layout
from penstock.tensor.linear import ColumnLinear, RowLinear
from penstock.tensor.membership import Member
from penstock.tensor.norms import ChannelNorm
from penstock.tracing.layers import CapturedLayer


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
    """

    kind: type[Member]
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    features: Layout = None
    adds: bool = False
    alike: bool = False
    bias: str = ""


_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_STATISTICS = ("weight", "bias", "running_mean", "running_var")

BY_ELEMENT: tuple[type[nn.Module], ...] = (
    nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU,
    nn.Mish, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid,
    nn.LogSigmoid, nn.Softsign,
)  # fmt: skip
"""What treats every number by itself, and so works on any part."""

BY_CHANNEL: tuple[type[nn.Module], ...] = (
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d, nn.Upsample, nn.ZeroPad2d, nn.PixelShuffle,
)  # fmt: skip
"""What treats every row and channel by itself, where both are dimensions of their own."""


def way(module: nn.Module, split: str, name: str) -> Way:
    """How members share a module that is split so.

    Args:
        split: ``"column"`` (``"column/3"`` where its outputs are three pieces, as queries, keys and
            values are), ``"row"``, ``"features"`` or ``"heads"``.
        name: of the module, for errors.

    Raises:
        ModelError: it cannot be.
    """
    bare, _, blocks = split.partition("/")
    if bare in ("features", "heads"):
        return _inside(module, bare, name)
    if isinstance(module, CapturedLayer):
        raise _refused(module, split, name, _CAPTURED)
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


_CAPTURED = (
    "it is a layer of a captured model, whose forward was recorded for whole values; let all "
    'tensor ranks repeat it ("whole") or take their rows ("data"), or give the model a spine'
)
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


def _outputs(module: nn.Module) -> int:
    if isinstance(module, nn.Embedding):
        return module.embedding_dim
    return int(module._parameters["weight"].shape[0])  # type: ignore[union-attr]


def _column(module: nn.Module, blocks: int) -> Way:
    if isinstance(module, nn.Embedding):
        return Way(ColumnEmbedding, {"weight": Cut(1, blocks)}, FEATURES)
    cuts = {"weight": Cut(0, blocks), "bias": Cut(0, blocks)}
    if isinstance(module, nn.Linear):
        return Way(ColumnLinear, cuts, FEATURES)
    return Way(ColumnConv, cuts, CHANNELS)


def _row(module: nn.Module) -> Way:
    if isinstance(module, nn.Embedding):
        return Way(RowEmbedding, {"weight": Cut(0)}, FEATURES, adds=True)
    cuts = {"weight": Cut(1)}
    if isinstance(module, nn.Linear):
        return Way(RowLinear, cuts, FEATURES, adds=True, bias="bias")
    return Way(RowConv, cuts, CHANNELS, adds=True, bias="bias")


def _inside(module: nn.Module, split: str, name: str) -> Way:
    if isinstance(module, nn.Dropout):
        return Way(PartDropout, features=FEATURES if split == "features" else 1)
    if split == "heads":
        return Way(Member, alike=True)
    if isinstance(module, _NORMS):
        return channels(module)
    if next(module.parameters(), None) is None:
        return Way(Member)
    raise _refused(module, split, name, "nobody knows which of its parameters belong to a feature")


def channels(module: nn.Module) -> Way:
    """How members share a batch norm, channel by channel."""
    held = {**module._parameters, **module._buffers}
    cuts = {key: Cut(0) for key in _STATISTICS if held.get(key) is not None}
    return Way(ChannelNorm, cuts, CHANNELS)


def works_on_channels(module: nn.Module) -> bool:
    """Whether a module can take a part of the channels, or features, and give such a part."""
    if isinstance(module, nn.Flatten):
        return module.start_dim == 1
    return isinstance(module, (*_NORMS, *BY_CHANNEL, *BY_ELEMENT, nn.Dropout))


def works_on_features(module: nn.Module) -> bool:
    """Whether a module treats every number by itself."""
    return isinstance(module, (*BY_ELEMENT, nn.Dropout))


def has_batch_statistics(module: nn.Module) -> bool:
    """Whether a module's output for a row depends on other rows."""
    return any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules())
