"""``parts_in``: the parts of a layer that tensor ranks can share, told by the structure of modules.

An attention is three projections whose outputs are cut into heads, and one that takes them up; an
MLP is one linear layer, or two of which one gates the other, and one that takes their features up.
They are known by their shapes and by the roles that attributes of modules have in ``transformers``
and in torch. Of a captured layer, its recorded code is followed from the first to the last: what
would have to be made whole in between is no part. Authors of other modules name the parts::

    class Attention(nn.Module):
        tensor_splits = {"queries_keys_values": "column/3", "project": "row"}

        def __init__(self, width, heads):
            self.tensor_pieces = heads  # each tensor rank has as many
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from penstock.base.errors import ModelError
from penstock.base.values import is_whole
from penstock.core.layer_part import LossSees, PartKind
from penstock.engine.model.spine import NamedLayer
from penstock.engine.tensor.attention import is_block
from penstock.engine.tensor.divided_layers import is_transposed
from penstock.engine.tensor.group import TensorGroup
from penstock.engine.tensor.membership import ModuleSharing
from penstock.engine.tensor.recorded import for_member
from penstock.engine.tensor.recorded_calls import whole_of
from penstock.engine.tensor.splits import sharings_of, works_on_features
from penstock.engine.tracing.layers import CapturedLayer


class FoundPart(NamedTuple):
    """A part of a layer, before anything is measured; modules go by their names in the layer, as
    far as nothing else is said. See ``LayerPart``.

    Attributes:
        opens: the modules behind which features are divided.
        closes: those that take them up.
        num_sums: how often it sums.
        loss: see ``LayerPart``; of a captured model, whose code is followed (``followed``).
    """

    kind: PartKind
    splits: dict[str, str]
    pieces: int
    opens: tuple[str, ...]
    closes: tuple[str, ...]
    key_value_heads: int = 0
    gated: bool = False
    is_even: bool = False
    num_sums: int = 1
    loss: LossSees = ""

    def parameters(self, layer: nn.Module) -> Iterator[Tensor]:
        """The parameters of which each tensor rank has a shard."""
        for path, split in self.splits.items():
            for below, own in sharings_of(layer.get_submodule(path), split, path).items():
                module = layer.get_submodule(f"{path}.{below}".strip("."))
                held = (module._parameters.get(key) for key in own.cuts)
                yield from (weight for weight in held if weight is not None)


_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q", "k", "v"))
_ATTENTION_OUTPUTS = ("o_proj", "out_proj", "dense", "output.dense", "o")
_HEAD_WIDTHS = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size")
_HEAD_NORMS = ("q_norm", "k_norm")
_MLPS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("wi_0", "wi_1"), "wo"),
    (("w1", "w3"), "w2"),
    (("up_proj",), "down_proj"),
    (("wi",), "wo"),
    (("c_fc",), "c_proj"),
    (("fc1",), "fc2"),
    (("linear1",), "linear2"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("intermediate.dense",), "output.dense"),
)


def with_ties_alike(
    layers: Sequence[NamedLayer], parts: Sequence[Sequence[FoundPart]], tied: Container[int]
) -> list[list[FoundPart]]:
    """The parts of all layers without those whose tied parameters other layers do not divide alike:
    an embedding and a head do, by their vocabulary.

    Args:
        tied: the ids of parameters that several layers hold.
    """
    held = [[id(weight) for weight in {*layer.module.parameters()}] for layer in layers]
    having = Counter(key for own in held for key in own)
    tables = Counter(
        key
        for layer, own in zip(layers, parts, strict=True)
        for key in {key for part in own for key in _tied_of(part, layer, tied, _TABLES)}
    )
    return [
        [
            part
            for part in own
            if not _tied_of(part, layer, tied, _NO_TABLES)
            and all(tables[key] == having[key] for key in _tied_of(part, layer, tied, _TABLES))
        ]
        for layer, own in zip(layers, parts, strict=True)
    ]


_TABLES: tuple[PartKind, ...] = ("embedding", "head")
_NO_TABLES: tuple[PartKind, ...] = ("attention", "mlp", "block", "declared")


def _tied_of(
    part: FoundPart, layer: NamedLayer, tied: Container[int], kinds: Container[PartKind]
) -> set[int]:
    """The ids of tied parameters of which a part of one of these kinds has shards."""
    if part.kind not in kinds:
        return set()
    return {id(weight) for weight in part.parameters(layer.module) if id(weight) in tied}


def parts_in(layer: NamedLayer, model: nn.Module, *, is_last: bool) -> list[FoundPart]:
    """The parts of a layer of a model.

    Args:
        is_last: whether its output is the model's, or its loss.

    Raises:
        ModelError: a module's ``tensor_splits`` name no module in it, or split one that cannot be.
    """
    module = layer.module
    is_captured = isinstance(module, CapturedLayer)
    root = getattr(model, "original", model) if is_captured else module
    calls = module.calls if isinstance(module, CapturedLayer) else None
    chosen: list[FoundPart] = []
    taken: set[str] = set()
    for part in _candidates(root, layer, calls, is_last=is_last):
        if taken & part.splits.keys() or (calls is not None and not part.splits.keys() <= calls):
            continue
        if part.kind == "embedding" and chosen:
            continue  # a table of a block's, as of positions
        if isinstance(module, CapturedLayer) and not _is_followed(module, part):
            continue
        taken |= part.splits.keys()
        chosen.append(part)
    return chosen


def _candidates(
    root: nn.Module, layer: NamedLayer, calls: frozenset[str] | None, *, is_last: bool
) -> Iterator[FoundPart]:
    within = None
    for path, module in root.named_modules():
        if calls is not None and not _may_hold(path, calls):
            continue
        prefix = f"{path}." if path else ""
        if within is not None and path.startswith(within):
            continue  # divided with what it is in
        for part in _of_module(module, is_recorded=calls is not None):
            within = prefix if "" in part.splits else within
            yield _moved(part, path, prefix)
    by_itself = calls is None and not layer.module._modules
    if by_itself:  # a layer of torch's is divided as such
        return
    for path, module in root.named_modules():
        if calls is not None and path not in calls:
            continue
        if isinstance(module, nn.Embedding) and module.num_embeddings > module.embedding_dim:
            yield FoundPart("embedding", {path: "row"}, module.num_embeddings, (path,), (path,))
        if is_last and isinstance(module, nn.Linear) and module.out_features > module.in_features:
            yield FoundPart("head", {path: "column"}, module.out_features, (path,), ())


def _may_hold(path: str, calls: frozenset[str]) -> bool:
    """Whether a module may have parts of a layer that calls these."""
    return any(name == path or not path or name.startswith(f"{path}.") for name in calls)


def _moved(part: FoundPart, path: str, prefix: str) -> FoundPart:
    """A part of a module as one of what that is in."""

    def named(own: str) -> str:
        return f"{prefix}{own}" if own else path

    return part._replace(
        splits={named(own): split for own, split in part.splits.items()},
        opens=tuple(map(named, part.opens)),
        closes=tuple(map(named, part.closes)),
    )


def _of_module(module: nn.Module, *, is_recorded: bool) -> Iterator[FoundPart]:
    """The parts whose modules a module holds, by their names in it.

    Args:
        is_recorded: whether the code of the module is not its own any more, but recorded.
    """
    if isinstance(getattr(module, "tensor_splits", None), Mapping):
        yield _declared(module)
        return
    if is_block(module) and not is_recorded:
        yield _block(module)
        return
    if isinstance(module, nn.MultiheadAttention):
        yield FoundPart("attention", {"": "heads"}, module.num_heads, ("",), ("",), is_even=True)
        return
    yield from _attention(module)
    yield from _fused_attention(module)
    yield from _mlp(module)


def _declared(module: nn.Module) -> FoundPart:
    splits = dict(cast(Mapping[str, str], module.tensor_splits))
    name = type(module).__name__
    absent = [path for path in splits if _child(module, path) is None]
    if absent:
        raise ModelError(
            f"tensor_splits of {name} names {absent[0]!r}, but there is no such module in it; it "
            f"has {', '.join(path for path, _ in module.named_modules() if path)}"
        )
    columns = tuple(path for path, split in splits.items() if split.startswith("column"))
    rows = tuple(path for path, split in splits.items() if split == "row")
    if not columns or not rows:
        raise ModelError(
            f'tensor_splits of {name} are {splits}, but a part begins with a "column" and ends '
            'with a "row"; name both'
        )
    pieces = getattr(module, "tensor_pieces", 0)
    if not is_whole(pieces) or pieces < 0:
        raise ModelError(f"tensor_pieces of {name} is {pieces!r}, but must be a whole number ≥ 1")
    size = _outputs(module.get_submodule(columns[0])) // int(
        splits[columns[0]].partition("/")[2] or 1
    )
    return FoundPart("declared", splits, pieces or size, columns, rows, is_even=bool(pieces))


def _block(module: nn.Module) -> FoundPart:
    attentions = [name for name in ("self_attn", "multihead_attn") if name in module._modules]
    heads = cast(nn.MultiheadAttention, module.self_attn).num_heads
    return FoundPart(
        "block",
        {"": "heads"},
        heads,
        (*attentions, "linear1"),
        (*attentions, "linear2"),
        is_even=True,
        num_sums=1 + len(attentions),
    )


def _attention(module: nn.Module) -> Iterator[FoundPart]:
    """Queries, keys and values from a linear layer each, here or in a child (as BERT's)."""
    for inside in ("", "self."):
        holder = _child(module, inside[:-1]) if inside else module
        for names in _PROJECTIONS:
            projections = [_linear(holder, name) for name in names] if holder else [None]
            width = next(
                (vars(holder)[name] for name in _HEAD_WIDTHS if name in vars(holder)), 0
            ) if holder else 0  # fmt: skip
            if not width or not all(projections):
                continue
            queries, keys, values = (_outputs(cast(nn.Module, own)) for own in projections)
            output = _taking(module, _ATTENTION_OUTPUTS, queries)
            if _drops_weights(cast(nn.Module, holder)):
                continue
            if output is None or keys != values or queries % width or keys % width:
                continue
            paths = tuple(f"{inside}{name}" for name in names)
            splits = dict.fromkeys(paths, "column")
            norms = (f"{inside}{name}" for name in _HEAD_NORMS if _child(holder, name) is not None)
            splits |= dict.fromkeys(norms, "heads")
            yield FoundPart(
                "attention",
                {**splits, output: "row"},
                queries // width,
                paths,
                (output,),
                key_value_heads=keys // width,
                is_even=True,
            )


def _drops_weights(attention: nn.Module) -> bool:
    """Whether weights of attention may be dropped out: the function that does so inside attention
    would drop the same of every rank's heads."""
    numbers = [
        value for name, value in vars(attention).items()
        if "dropout" in name and isinstance(value, float)
    ]  # fmt: skip
    modules = [
        child.p for name, child in attention.named_children()
        if isinstance(child, nn.Dropout) and name != "resid_dropout"  # GPT-2's, behind the row
    ]  # fmt: skip
    return any(p > 0 for p in (*numbers, *modules))


def _fused_attention(module: nn.Module) -> Iterator[FoundPart]:
    """Queries, keys and values one behind another from one layer, as GPT-2's."""
    fused, width = _linear(module, "c_attn"), vars(module).get("head_dim")
    if fused is None or not is_whole(width) or not width:
        return
    if _drops_weights(module):
        return
    size = _outputs(fused) // 3
    if _outputs(fused) % 3 or size % width or _taking(module, ("c_proj",), size) is None:
        return
    splits = {"c_attn": "column/3", "c_proj": "row"}
    heads = size // width
    yield FoundPart(
        "attention", splits, heads, ("c_attn",), ("c_proj",), key_value_heads=heads, is_even=True
    )


def _mlp(module: nn.Module) -> Iterator[FoundPart]:
    for columns, row in _MLPS:
        linears = [_linear(module, name) for name in columns]
        if not all(linears):
            continue
        sizes = {_outputs(cast(nn.Module, own)) for own in linears}
        if len(sizes) > 1 or _taking(module, (row,), next(iter(sizes))) is None:
            return
        owners = {name.rpartition(".")[0] for name in columns}
        between = {
            f"{owner}.{name}".strip("."): "features"
            for owner in owners
            for name, child in module.get_submodule(owner).named_children()
            if not works_on_features(child) and _is_by_number(child)
        }
        splits = {**dict.fromkeys(columns, "column"), **between, row: "row"}
        gated = len(columns) > 1
        yield FoundPart("mlp", splits, sizes.pop(), columns, (row,), gated=gated)
        return


def _is_by_number(module: nn.Module) -> bool:
    """Whether a module without parameters does with each number the same, tried on a few: classes
    of activations are many."""
    if module._modules or [*module.parameters(), *module.buffers()]:
        return False
    sample = torch.linspace(-3.0, 3.0, 12, dtype=torch.float64).view(2, 6)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            whole = module(sample)
            halves = torch.cat([module(half) for half in sample.chunk(2, 1)], 1)
    except Exception:  # whatever it is, it is nothing that takes a tensor
        return False
    return (
        isinstance(whole, Tensor) and whole.shape == sample.shape and torch.allclose(whole, halves)
    )


def _child(module: nn.Module | None, path: str) -> nn.Module | None:
    for atom in path.split("."):
        module = None if module is None else module._modules.get(atom)
    return module


def _linear(module: nn.Module | None, path: str) -> nn.Module | None:
    child = _child(module, path)
    is_linear = isinstance(child, nn.Linear) and type(child).forward is nn.Linear.forward
    return child if child is not None and (is_linear or is_transposed(child)) else None


def _outputs(module: nn.Module) -> int:
    size: int = getattr(module, "nf", 0) or getattr(module, "out_features", 0)
    return size


def _inputs(module: nn.Module) -> int:
    size: int = getattr(module, "nx", 0) or getattr(module, "in_features", 0)
    return size


def _taking(module: nn.Module, names: Sequence[str], size: int) -> str | None:
    """The name of the linear layer that takes so many features."""
    for name in names:
        linear = _linear(module, name)
        if linear is not None and _inputs(linear) == size:
            return name
    return None


def _is_followed(layer: CapturedLayer, part: FoundPart) -> bool:
    """Whether a tensor rank can run the recorded code of a part without making anything whole."""
    if part.kind == "head":
        return True  # it is made whole behind the layer
    size = smallest_share(part)
    if size == 1:
        return True  # no group can share it, and is told so
    try:
        sharings = module_sharings(layer, part)
        group = cast(TensorGroup, SimpleNamespace(size=size, index=0))
        graph = for_member(layer.program.graph, layer.get_submodule, sharings, group)
    except ModelError:
        return False
    return not any(node.target is whole_of for node in graph.nodes)


def module_sharings(layer: nn.Module, part: FoundPart) -> dict[str, ModuleSharing]:
    """How members share the modules of a part, by their names in the layer."""
    return {
        f"{path}.{below}".strip("."): own
        for path, split in part.splits.items()
        for below, own in sharings_of(layer.get_submodule(path), split, path).items()
    }


def smallest_share(part: FoundPart) -> int:
    """The smallest group, but one rank, that can share a part."""
    pieces = part.key_value_heads or part.pieces
    if not part.is_even:
        return min(2, pieces)
    return next((size for size in range(2, pieces + 1) if pieces % size == 0), 1)
