"""A model's layers as functions that can be run one by one, with skips handed along."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from penstock.base.errors import ModelError
from penstock.engine.model import tree
from penstock.engine.model.spine import NamedLayer, Skip, run_layer
from penstock.engine.run.recipe import Loss

RunLayer = Callable[[Any], Any]
"""Takes what the layer before gave, and gives what this one gives."""


class Carried(NamedTuple):
    """What crosses a cut while skips are open: the layer's output, and the skips by their key."""

    value: Any
    skips: dict[str, Skip]


def runs_of(layers: Sequence[NamedLayer], loss: Loss | None, targets: Any) -> list[RunLayer]:
    """The layers as functions that name themselves when they fail; the last goes on to the loss."""
    runs = [_run_of(layer) for layer in layers]
    if loss is not None:
        last = runs[-1]
        runs[-1] = lambda value: loss(_without_skips(last(value)), targets)
    return [partial(_run_named, layer, run) for layer, run in zip(layers, runs, strict=True)]


def in_one(runs: Sequence[RunLayer]) -> RunLayer:
    """All layers as one function, without a cut between them."""

    def run_all(value: Any) -> Any:
        for run in runs:
            value = run(value)
        return value

    return run_all


class HandedOn(NamedTuple):
    """Bytes that a layer hands on.

    Attributes:
        output: to the next layer.
        skips: past the next layer, by the name of the layer that takes them.
    """

    output: int
    skips: dict[str, int]


def handed_on(layers: Sequence[NamedLayer], index: int, output: Any, is_loss: bool) -> HandedOn:
    """The bytes of a layer's result that it made itself; it may pass on those of others.

    Args:
        index: the layer's position among them.
        output: what the layer's function gave.
        is_loss: whether ``output`` is the loss that follows the last layer.
    """
    layer, value = layers[index], _without_skips(output)
    if not is_loss and hasattr(layer.module, "readers") and index + 1 < len(layers):
        return _handed_on_by_captured(layer.module, index, layers[index + 1].name, value)
    takers = {key: other.name for other in layers for key in other.recalls}
    skips = output.skips if isinstance(output, Carried) else {}
    sizes: Counter[str] = Counter()
    for key in layer.stashes if skips else ():
        sizes[takers[key]] += num_bytes(skips[key].value)
    return HandedOn(num_bytes(value), dict(sizes))


def _handed_on_by_captured(module: Any, index: int, following: str, value: Any) -> HandedOn:
    """A captured layer passes on what others made; each value travels to its last reader."""
    leaves, _ = tree.flatten(value)
    # What the first one passes on is the model's own input.
    own = range(len(leaves)) if index == 0 else module.produces
    sizes: Counter[str] = Counter()
    for position in own:
        sizes[module.readers[position]] += num_bytes(leaves[position])
    return HandedOn(sizes.pop(following, 0), {name: size for name, size in sizes.items() if size})


def num_bytes(value: Any) -> int:
    """The bytes of all tensors in a value."""
    return sum(tensor.nbytes for tensor in tree.tensors(value))


def _without_skips(value: Any) -> Any:
    return value.value if isinstance(value, Carried) else value


def _run_of(layer: NamedLayer) -> RunLayer:
    if layer.stashes or layer.recalls:
        return partial(_run_with_skips, layer)
    return partial(_run_beside_skips, layer.module)


def _run_beside_skips(module: nn.Module, value: Any) -> Any:
    if isinstance(value, Carried):
        return Carried(module(value.value), value.skips)
    return module(value)


def _run_with_skips(layer: NamedLayer, value: Any) -> Any:
    skips = dict(value.skips) if isinstance(value, Carried) else {}
    output = run_layer(layer, _without_skips(value), skips)
    return Carried(output, skips) if skips else output


def _run_named(layer: NamedLayer, run: RunLayer, value: Any) -> Any:
    try:
        return run(value)
    except Exception as error:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tree.tensors(value))
        raise ModelError(
            f"layer {layer.name!r} ({type(layer.module).__name__}) failed on an input of shape "
            f"{shapes}: {type(error).__name__}: {error}"
        ) from error
