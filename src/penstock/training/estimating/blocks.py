"""Lists of blocks that are all alike: three of them say what all take.

A model of 126 blocks takes minutes to trace, one of three blocks seconds, and the profile of the
second is repeated (``LayerGraph.with_blocks``): the first and the last have other neighbours.
Blocks are alike if their modules have the same
classes, shapes and settings, but for their own number.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import nn

_KEPT = 3
_LEAST = 5
_PLAIN = (bool, str, float, int, type(None))


class RepeatedBlocks(NamedTuple):
    """A list of equal blocks: its name in the model, and how many there are."""

    name: str
    num_blocks: int


def repeated_blocks(model: nn.Module) -> list[RepeatedBlocks]:
    """The lists of at least five equal blocks, none inside another."""
    chosen: list[RepeatedBlocks] = []
    for name, module in model.named_modules():
        if not name or not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        if any(name.startswith(f"{other.name}.") for other in chosen):
            continue
        if len(module) >= _LEAST and _are_alike(module):
            chosen.append(RepeatedBlocks(name, len(module)))
    return chosen


@contextmanager
def shortened(model: nn.Module, lists: list[RepeatedBlocks]) -> Iterator[None]:
    """Within, a model has only the first three blocks of each of these lists."""
    shortened_lists = [model.get_submodule(name) for name, _ in lists]
    before = [dict(module._modules) for module in shortened_lists]
    try:
        for module in shortened_lists:
            for key in list(module._modules)[_KEPT:]:
                del module._modules[key]
        yield
    finally:
        for module, entries in zip(shortened_lists, before, strict=True):
            module._modules.clear()
            module._modules.update(entries)


def _are_alike(blocks: nn.ModuleList | nn.Sequential) -> bool:
    own = [_traits(block, index) for index, block in enumerate(blocks)]
    is_empty = not any(True for _ in blocks[0].parameters())
    return not is_empty and all(traits == own[0] for traits in own[1:])


def _traits(block: nn.Module, index: int) -> list[object]:
    traits: list[object] = []
    for name, module in block.named_modules():
        settings = sorted(
            (key, repr(value))
            for key, value in vars(module).items()
            if isinstance(value, _PLAIN) and not _is_number_of(key, value, index)
        )
        shapes = [
            (key, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
            for key, tensor in (
                *module.named_parameters(recurse=False), *module.named_buffers(recurse=False)
            )
        ]  # fmt: skip
        traits.append((name, type(module), settings, shapes))
    return traits


def _is_number_of(key: str, value: object, index: int) -> bool:
    return key.endswith(("idx", "index", "number", "layer_id")) and value in (index, index + 1)
