"""Slices: parts of a microbatch's sequence that pass through a stage one after the other.

A layer that treats every position by itself sees no difference. One that mixes positions, as
attention does, says what a later slice needs of the earlier ones, in a method beside ``forward``::

    class Attention(nn.Module):
        def forward_slice(self, value, carry):
            # carry: None at the first slice; then what the slice before has returned here
            queries, keys, values = self.project(value)
            if carry is not None:
                keys, values = (torch.cat(pair, 1) for pair in zip(carry, (keys, values)))
            return self.attend(queries, keys, values), (keys, values)

The outputs of all slices together must be what ``forward`` gives on the whole sequence. A carry may
be any nested tensors and plain numbers. Gradients flow back through it, from the last slice to the
first. What the layer recalls is given to it by keyword, and what it stashes stands beside its
output, as in ``forward``; forward hooks of the layer itself do not fire.

Each slice draws its own random numbers: dropout can be repeated and does not depend on the number
of stages, but its masks are not those of the whole sequence.

To a stage, a carry is a skip from one slice to the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Protocol, TypeVar

from torch import nn

from penstock.base.errors import InputError, ModelError
from penstock.engine.model.spine import NamedLayer, call_layer, parted

V = TypeVar("V")

_BY_POSITION: tuple[type[nn.Module], ...] = (
    nn.Linear, nn.Embedding, nn.Identity, nn.Dropout, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU,
    nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Hardtanh,
    nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid, nn.Softsign,
)  # fmt: skip
"""Modules of torch that treat each position by itself, whatever their arguments are."""


class LayerCall(Protocol):
    """How a layer is called: with its input and what it recalls; gives what it stashes, too."""

    def __call__(
        self, layer: NamedLayer, value: Any, recalled: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]: ...


def check_sliceable(layers: Iterable[NamedLayer]) -> None:
    """Raise ``ModelError`` unless every layer says what slices of a sequence mean to it."""
    for layer in layers:
        if not _carries(layer.module) and not _by_position(layer.module):
            raise ModelError(
                f"layer {layer.name!r} ({type(layer.module).__name__}) does not say how it works "
                "on a slice of the sequence: if it treats each position by itself, give its class "
                "`by_position = True`; if it mixes positions, give it a method "
                "`forward_slice(self, value, carry)` that returns (output, carry for the next "
                "slice), see penstock.engine.stage.slices; or choose a schedule without slices"
            )


def _carries(module: nn.Module) -> bool:
    return callable(getattr(module, "forward_slice", None))


def _by_position(module: nn.Module) -> bool:
    if getattr(module, "by_position", False) is True:
        return True
    if isinstance(module, nn.LayerNorm | nn.RMSNorm) and len(module.normalized_shape) > 1:
        return False
    if isinstance(module, nn.Sequential) and _runs_as(module, nn.Sequential):
        return all(map(_by_position, module))
    return any(_runs_as(module, kind) for kind in (*_BY_POSITION, nn.LayerNorm, nn.RMSNorm))


def _runs_as(module: nn.Module, kind: type[nn.Module]) -> bool:
    return isinstance(module, kind) and type(module).forward is kind.forward


def call_of(layer: NamedLayer, num_slices: int) -> tuple[LayerCall, str | None]:
    """How to call a layer, and the key of its carry if it has one."""
    if num_slices == 1 or not _carries(layer.module):
        return call_layer, None
    key = f"carry of {layer.name}"  # no identifier, so no skip of the model is called so
    return partial(_call_slice, key=key), key


def _call_slice(
    layer: NamedLayer, value: Any, recalled: dict[str, Any], key: str
) -> tuple[Any, dict[str, Any]]:
    carry = recalled.get(key)
    skips = {name: skip for name, skip in recalled.items() if name != key}
    result = layer.module.forward_slice(value, carry, **skips)  # type: ignore[operator]
    if not isinstance(result, tuple) or len(result) != 2:
        raise ModelError(
            f"forward_slice of layer {layer.name!r} must return (output, carry for the next "
            f"slice), but it returned a {type(result).__name__}"
        )
    output, stashed = parted(layer, result[0])
    return output, {**stashed, key: result[1]}


class Relay:
    """Passes on what each slice of a microbatch leaves for the next one within a stage.

    Slices are numbered through: microbatch × ``num_slices`` + slice.

    Args:
        stage: its number, for errors.
        keys: the names of the carries.
        num_slices: how many slices a microbatch has.
        backward: gradients, which the last slice leaves first.
    """

    def __init__(self, stage: int, keys: Iterable[str], num_slices: int, *, backward: bool) -> None:
        self._stage = stage
        self._keys = frozenset(keys)
        self._num_slices = num_slices
        self._first, self._last = (num_slices - 1, 0) if backward else (0, num_slices - 1)
        self._ahead = -1 if backward else 1
        self._left: dict[int, dict[str, Any]] = {}

    def take(self, number: int) -> dict[str, Any]:
        """The carries that were left for a slice, by key; nothing for the one that comes first.

        Raises:
            InputError: the slice before it has not come.
        """
        if number % self._num_slices == self._first:
            return {}
        if number not in self._left:
            before, after = (
                slice_name(slice_number, self._num_slices)
                for slice_number in (number - self._ahead, number)
            )
            raise InputError(f"on stage {self._stage}, {before} must come before {after}")
        return self._left.pop(number)

    def leave(self, number: int, made: Mapping[str, V]) -> dict[str, V]:
        """Keep a slice's carries for the next one; gives back what is none."""
        if number % self._num_slices != self._last:
            own = {key: value for key, value in made.items() if key in self._keys}
            self._left[number + self._ahead] = own
        return {key: value for key, value in made.items() if key not in self._keys}

    def forget(self) -> None:
        """Drop the carries that were left, after a failed step."""
        self._left.clear()


def slice_name(number: int, num_slices: int) -> str:
    """The name of a slice in errors; that of its microbatch where there is one slice only."""
    microbatch, part = divmod(number, num_slices)
    whole = f"microbatch {microbatch}"
    return whole if num_slices == 1 else f"slice {part} of {whole}"
