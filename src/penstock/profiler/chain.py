"""A model's layers as functions that can be run one by one, with skips handed along."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from penstock import tree
from penstock.errors import ModelError
from penstock.spine import NamedLayer, Skip, run_layer

Run = Callable[[Any], Any]
"""From what the layer before gave to what this one gives."""
Loss = Callable[[Any, Any], Tensor]


class Carried(NamedTuple):
    """What crosses a cut while skips are open: the layer's output, and the skips by their key."""

    value: Any
    skips: dict[str, Skip]


def runs_of(layers: Sequence[NamedLayer], loss: Loss | None, targets: Any) -> list[Run]:
    """The layers as functions that name themselves when they fail; the last goes on to the loss."""
    runs = [_run_of(layer) for layer in layers]
    if loss is not None:
        last = runs[-1]
        runs[-1] = lambda value: loss(_without_skips(last(value)), targets)
    return [partial(_run_named, layer, run) for layer, run in zip(layers, runs, strict=True)]


def in_one(runs: Sequence[Run]) -> Run:
    """All of them as one function, without a cut between them."""

    def run(value: Any) -> Any:
        for one in runs:
            value = one(value)
        return value

    return run


class HandedOn(NamedTuple):
    """Bytes that a layer hands on: to the layers that read its output, and as skips by key."""

    output: int
    skips: dict[str, int]


def handed_on(layer: NamedLayer, output: Any, is_loss: bool) -> HandedOn:
    """What of a layer's result it made itself.

    Args:
        layer: a captured one may pass on what it was given beside what it ``produces``.
        output: what its function gave.
        is_loss: whether that went on to the loss.
    """
    value = _without_skips(output)
    produces = None if is_loss else getattr(layer.module, "produces", None)
    if produces is not None:
        leaves, _ = tree.flatten(value)
        value = [leaves[position] for position in produces]
    skips = output.skips if isinstance(output, Carried) else {}
    return HandedOn(
        num_bytes(value), {key: num_bytes(skips[key].value) for key in layer.stashes if skips}
    )


def num_bytes(value: Any) -> int:
    """Bytes of the tensors in a value."""
    return sum(tensor.nbytes for tensor in tree.tensors(value))


def _without_skips(value: Any) -> Any:
    return value.value if isinstance(value, Carried) else value


def _run_of(layer: NamedLayer) -> Run:
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


def _run_named(layer: NamedLayer, run: Run, value: Any) -> Any:
    try:
        return run(value)
    except Exception as error:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tree.tensors(value))
        raise ModelError(
            f"layer {layer.name!r} ({type(layer.module).__name__}) failed on an input of shape "
            f"{shapes}: {type(error).__name__}: {error}"
        ) from error
