"""Running a stage's layers in turn, each in its random stream and with its skips."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock import tree
from penstock.errors import ModelError
from penstock.randomness import LayerStreams
from penstock.replay import Run, in_turn, recomputed
from penstock.slices import call_of
from penstock.spine import NamedLayer, Skip
from penstock.tracing.units import beside, units_of

Where = tuple[int, int, int]
"""(step, microbatch, slice), for random streams."""


_OVERWRITTEN = re.compile(
    r"inplace operation: \[\S+ \[([\d, ]*)\].* is at version (\d+);", re.DOTALL
)


def explain_overwritten(layers: Sequence[NamedLayer], error: RuntimeError) -> None:
    """Say more about a backward that failed, if what it needs is a buffer that was overwritten.

    Args:
        layers: that it went through.
        error: what autograd raised.

    Raises:
        ModelError: it is; the buffer is named.
    """
    found = _OVERWRITTEN.search(str(error))
    if found is None:
        return
    shape = tuple(int(size) for size in found[1].split(",") if size.strip())
    for layer in layers:
        for name, buffer in layer.module.named_buffers():
            if buffer.is_inference() or tuple(buffer.shape) != shape:
                continue
            if buffer._version == int(found[2]):
                key = f"{layer.prefix}.{name}" if layer.prefix else name
                raise ModelError(
                    f"layer {layer.name!r} overwrites its buffer {key!r} in place, while the "
                    "backward of an earlier forward still needs the value before: several "
                    f"microbatches are in flight. Assign a new value (`self.{name} = self.{name} "
                    f"+ 1`) instead, compute with a copy (`self.{name}.clone()`), or set the "
                    'stage\'s recompute to "stage"'
                ) from error


def apart_from_buffers(value: Any, modules: Iterable[nn.Module]) -> Any:
    """A value with copies in the place of tensors that share memory with buffers of modules (each
    alone, not of those inside)."""
    held = {
        buffer.untyped_storage().data_ptr()
        for module in modules
        for buffer in module._buffers.values()
        if buffer is not None and buffer.layout is torch.strided
    } - {0}

    def apart(tensor: Tensor) -> Tensor:
        shares = tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() in held
        return tensor.clone() if shares else tensor

    return tree.replace(Tensor, apart, value) if held else value


class LayerRuns:
    """Consecutive layers of a model.

    Args:
        layers: at least one.
        first_layer: index of the first of them in the whole model.
        streams: where layers draw random numbers.
        recompute: keep only what each layer is given, and run it again when its backward comes.
            Layers of a captured model run again block by block.
        num_slices: of a microbatch.

    Attributes:
        carries: keys of what layers leave for the next slice.
    """

    def __init__(
        self,
        layers: Sequence[NamedLayer],
        first_layer: int,
        streams: LayerStreams,
        recompute: bool,
        num_slices: int,
    ) -> None:
        self._layers = layers
        self._first_layer = first_layer
        self._streams = streams
        self._recompute = recompute
        self._calls = [call_of(layer, num_slices) for layer in layers]
        self.carries = [key for _, key in self._calls if key is not None]
        self._units = units_of([layer.module for layer in layers])
        self._plain = frozenset(
            at
            for at, (layer, (_, carry)) in enumerate(zip(layers, self._calls, strict=True))
            if carry is None and not layer.stashes and not layer.recalls
        )

    def run(
        self, value: Any, skips: dict[str, Skip], where: Where, again: bool
    ) -> tuple[Any, bool]:
        """The output of the last layer, and whether any drew.

        Recalled skips leave ``skips``, stashed ones join it.

        Args:
            value: the input of the first.
            skips: that earlier stages, or slices, left.
            where: for random streams.
            again: the whole stage will run again, so no layer needs to prepare for that.
        """
        if self._recompute and torch.is_grad_enabled() and not again:
            return self._run_units(value, skips, where)
        drew = False
        for at, layer in enumerate(self._layers):
            index = self._first_layer + at
            if at in self._plain and self._streams.is_quiet(index, layer.module.training):
                # Nearly all layers, every time: looking for skips costs several times as much.
                value = layer.module(value)
                continue
            value, drew_too = self._pass(at, self._in_stream(at, where), value, skips)
            drew = drew or drew_too
        return value, drew

    def _run_units(self, value: Any, skips: dict[str, Skip], where: Where) -> tuple[Any, bool]:
        drew = False
        kept: dict[int, Tensor] = {}
        for start, stop in self._units:
            modules = [layer.module for layer in self._layers[start:stop]]
            run = in_turn([self._in_stream(at, where) for at in range(start, stop)])
            run = beside(modules, recomputed(modules, run, kept))
            value, drew_too = self._pass(start, run, value, skips)
            drew = drew or drew_too
        # What leaves the stage may be overwritten; what will run again must not.
        own = tree.replace(Tensor, lambda one: one.clone() if id(one) in kept else one, value)
        return own, drew

    def _pass(self, at: int, run: Run, value: Any, skips: dict[str, Skip]) -> tuple[Any, bool]:
        """Give a layer what it recalls, and take what it stashes."""
        layer, (_, carry) = self._layers[at], self._calls[at]
        keys = (*layer.recalls, carry) if carry in skips else layer.recalls
        recalled = {key: skips.pop(key).taken(key) for key in keys}
        value, drew, stashed = run(value, recalled)
        skips.update((key, Skip.of(skip)) for key, skip in stashed.items())
        return value, drew

    def _in_stream(self, at: int, where: Where) -> Run:
        layer, (call, _), index = self._layers[at], self._calls[at], self._first_layer + at

        def run(value: Any, recalled: dict[str, Any]) -> tuple[Any, bool, dict[str, Any]]:
            mode = layer.module.training
            with self._streams.stream(index, mode, *where) as stream:
                value, stashed = call(layer, value, recalled)
            self._streams.learn(index, mode, stream)
            return value, stream is not None and stream.drew, stashed

        return run
