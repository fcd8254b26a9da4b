"""Which modules of a model the stages of a plan have, in units that other engines cut between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from penstock.base.errors import InputError
from penstock.planning.handover.capabilities import CutsBetween
from penstock.planning.plans import Plan


def module_fqns_per_model_part(plan: Plan, *, nested: bool = False) -> list[list[str]]:
    """Which modules each stage of a plan has, as torchtitan's
    ``parallelism.module_fqns_per_model_part`` lists them.

    torchtitan cuts between the children of the model, and between the entries of those that are an
    ``nn.ModuleList`` or an ``nn.ModuleDict``; what a plan says of modules inside of them is said
    of the whole. Models of transformers have these in a child, ``model``; torchtitan calls them as
    those of its own models, the embedding ``tok_embeddings`` and the blocks ``layers.0`` and so on.

    Args:
        plan: for the model, with names that are those of its modules, as spines and
            ``pk.capture(…, granularity="block")`` give them.
        nested: whether the list may stand deeper in the model, as ``model.layers.0`` does in those
            of transformers, and modules beside it have their whole names: for NeMo AutoModel.

    Returns:
        By stage, the names of its modules in the order in which they run.

    Raises:
        InputError: a cut goes through such a module, or a module runs in two stages.
    """
    part_of = _entry_of_list if nested else child_namer(plan.layers)
    return [list(names) for names in _by_stage(plan, part_of)]


def with_rotary(parts: Sequence[Sequence[str]], name: str) -> list[list[str]]:
    """The modules of each stage with the rotary embeddings, which have no weights and are wanted by
    every block; a name that the model has not is none that an engine misses."""
    return [[own for own in names if own != name] + [name] for names in parts]


class TransformerStages(NamedTuple):
    """The stages of a transformer, by the kinds of their modules.

    Attributes:
        name: of the list that has the blocks, as in ``layers``.
        before: by stage, modules in front of the first block.
        blocks: by stage, how many blocks.
        behind: by stage, modules behind the last block.
    """

    name: str
    before: tuple[tuple[str, ...], ...]
    blocks: tuple[int, ...]
    behind: tuple[tuple[str, ...], ...]


class Blocks(NamedTuple):
    """The blocks of a transformer among its layers.

    Attributes:
        name: of the list that has them, as in ``layers``.
        starts: for each block, the number of its first layer.
        behind: the number of the first layer behind the last block.
    """

    name: str
    starts: tuple[int, ...]
    behind: int


def blocks_of(layers: Sequence[str]) -> Blocks:
    """The blocks of a transformer: the entries of its longest list of modules.

    Raises:
        InputError: no layer is the entry of a list, or something stands between two blocks.
    """
    entries = [_entry_of_list(layer) for layer in layers]
    lists = [_list_of(name) for name in entries]
    counts = Counter(_list_of(name) for name in dict.fromkeys(entries))
    del counts[""]
    if not counts:
        raise InputError(
            f"no layer is a block of a transformer, an entry of a list as layers.0 is: the layers "
            f"are {', '.join(map(repr, layers[:6]))}{' …' * (len(layers) > 6)}"
        )
    name = max(counts, key=lambda entry: counts[entry])
    first = lists.index(name)
    behind = len(lists) - lists[::-1].index(name)
    for entry, own in zip(entries[first:behind], lists[first:behind], strict=True):
        if own != name:
            raise InputError(f"{entry!r} stands between two blocks of {name!r}")
    starts = [
        place
        for place in range(first, behind)
        if place == first or entries[place] != entries[place - 1]
    ]
    return Blocks(name, tuple(starts), behind)


def places_inside(layers: Sequence[str], between: CutsBetween) -> frozenset[int]:
    """The numbers of the layers with which no stage can begin where only such parts are cut; none
    of a model without blocks, if these are asked for."""
    inner = range(1, len(layers))
    if between == "layers":
        return frozenset()
    if between == "blocks":
        try:
            blocks = blocks_of(layers)
        except InputError:
            return frozenset()
        return frozenset(inner) - {*blocks.starts, blocks.behind}
    part_of = child_namer(layers) if between == "children" else _entry_of_list
    parts = [part_of(layer) for layer in layers]
    return frozenset(place for place in inner if parts[place] == parts[place - 1])


def block_layout(plan: Plan) -> TransformerStages:
    """The stages of a plan for a transformer: a list of blocks, with modules before and behind.

    Raises:
        InputError: no layer is the entry of a list; or a cut goes through a block; or something
            stands between two blocks.
    """
    stages = _by_stage(plan, _entry_of_list)
    blocks = blocks_of(plan.layers)
    before = {_entry_of_list(layer) for layer in plan.layers[: blocks.starts[0]]}
    return TransformerStages(
        blocks.name,
        tuple(tuple(name for name in own if name in before) for own in stages),
        tuple(sum(_list_of(name) == blocks.name for name in own) for own in stages),
        tuple(
            tuple(name for name in own if name not in before and _list_of(name) != blocks.name)
            for own in stages
        ),
    )


def _by_stage(plan: Plan, part_of: Callable[[str], str]) -> list[tuple[str, ...]]:
    parts: list[tuple[str, ...]] = []
    stage_of: dict[str, int] = {}
    for index, stage in enumerate(plan.stages):
        names = dict.fromkeys(part_of(layer) for layer in stage.layers)
        for name in names:
            if stage_of.setdefault(name, index) != index:
                raise InputError(
                    f"stage {stage_of[name]} and stage {index} both have a part of {name!r}, which "
                    "other engines do not cut; capture the model with granularity='block' and plan "
                    "again, or give cuts=…"
                )
        parts.append((*names,))
    return parts


_CHILD = "model."
_RENAMED = {"embed_tokens": "tok_embeddings", "final_layernorm": "norm"}
"""torchtitan's names (its ``experiments/transformers_modeling_backend/model.py``)."""


def is_of_transformers(layers: Sequence[str]) -> bool:
    """Whether layers are named as those of transformers' models like Llama, which torchtitan has
    names for."""
    parts = {_entry_of_list(layer) for layer in layers}
    return f"{_CHILD}embed_tokens" in parts and any(
        _list_of(part) == f"{_CHILD}layers" for part in parts
    )


def child_namer(layers: Sequence[str]) -> Callable[[str], str]:
    """The function that names the part of a model between whose parts torchtitan cuts, by a layer
    in it.

    Args:
        layers: of the whole model.
    """
    if not is_of_transformers(layers):
        return _part_of_model

    def name_of(layer: str) -> str:
        child = _part_of_model(layer.removeprefix(_CHILD))
        return _RENAMED.get(child, child)

    return name_of


def _part_of_model(layer: str) -> str:
    """The child of the model, or the entry of such a list, in which a layer is."""
    child, *inner = layer.split("#", maxsplit=1)[0].split(".")
    return f"{child}.{inner[0]}" if inner and inner[0].isdecimal() else child


def _entry_of_list(layer: str) -> str:
    """The entry of the outermost list in which a layer is; the layer, if it is in none."""
    parts = layer.split("#", maxsplit=1)[0].split(".")
    number = next((place for place, part in enumerate(parts) if place and part.isdecimal()), None)
    return ".".join(parts if number is None else parts[: number + 1])


def _list_of(name: str) -> str:
    """The list whose entry a module is; empty if it is none."""
    head, _, last = name.rpartition(".")
    return head if last.isdecimal() else ""
