"""Running a stage's layers in turn, each in its random stream and with its skips."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks_of_all

from penstock.base.errors import ModelError
from penstock.engine.device.crossing import copy_of
from penstock.engine.model import tree
from penstock.engine.model.randomness import LayerStreams
from penstock.engine.model.replay import Formers, Run, in_turn, recomputed
from penstock.engine.model.spine import NamedLayer, Skip
from penstock.engine.stage.slices import call_of
from penstock.engine.tracing.layers import CapturedLayer, RecomputedTogether, units_of

Where = tuple[int, int, int]
"""(step, microbatch, slice), for random streams."""


_OVERWRITTEN = re.compile(
    r"inplace operation: \[(\S+) \[([\d, ]*)\]\](.*) is at version (\d+);", re.DOTALL
)


def explain_overwritten(layers: Sequence[NamedLayer], error: RuntimeError) -> None:
    """Say more about a backward that failed, if what it needs is a buffer that was overwritten.

    autograd tells type, shape and version of what was overwritten, and what computed it; a buffer
    is computed by nothing. Several buffers may fit; then all of them are named.

    Raises:
        ModelError: it is; the buffer is named.
    """
    match = _OVERWRITTEN.search(str(error))
    if match is None or "is output" in match[3]:
        return
    shape = tuple(int(size) for size in match[2].split(",") if size.strip())
    holders: dict[int, list[tuple[NamedLayer, str]]] = {}
    for layer in layers:
        for name, buffer in layer.module.named_buffers():
            if buffer.is_inference() or (buffer.type(), tuple(buffer.shape)) != (match[1], shape):
                continue
            if buffer._version == int(match[4]):
                holders.setdefault(id(buffer), []).append((layer, name))
    if holders:
        raise ModelError(
            f"{_overwriting([held[0] for held in holders.values()])} in place, while the backward "
            "of an earlier forward still needs the value before: several microbatches are in "
            f"flight. {_instead(*next(iter(holders.values()))[0])}"
        ) from error


def _overwriting(suspects: Sequence[tuple[NamedLayer, str]]) -> str:
    names = [(layer.name, layer.key(name)) for layer, name in suspects]
    if len(names) == 1:
        return f"layer {names[0][0]!r} overwrites its buffer {names[0][1]!r}"
    some = " or ".join(f"{key!r} of layer {name!r}" for name, key in names[:5])
    return f"a layer overwrites a buffer, which may be {some}{' or another' * (len(names) > 5)},"


def _instead(layer: NamedLayer, name: str) -> str:
    leaf = name.rpartition(".")[2]
    copied = f'ompute with a copy (`self.{leaf}.clone()`), or set the stage\'s recompute to "stage"'
    if isinstance(layer.module, CapturedLayer) and leaf != name:
        return f"C{copied}"  # tracing does not see values assigned in modules of the model
    return f"Assign a new value (`self.{leaf} = self.{leaf} + 1`) instead, c{copied}"


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
        return copy_of(tensor) if shares else tensor

    return tree.replace(Tensor, apart, value) if held else value


def only_reads(layer: nn.Module, given: Tensor) -> bool:
    """Whether a layer is known neither to overwrite what it is given nor to give it a gradient of
    other strides, so that it may be given the leaf where that gradient will be."""
    return (
        type(layer) is nn.Linear
        and type(given) is Tensor
        and given.requires_grad
        and given.is_contiguous()
        and not layer._forward_pre_hooks
        and not layer._forward_hooks
        and not hooks_of_all._global_forward_pre_hooks
        and not hooks_of_all._global_forward_hooks
        and "forward" not in vars(layer)
    )


class LayerRuns:
    """Consecutive layers of a model.

    Args:
        first_layer: index of the first of these layers in the whole model.
        streams: where layers draw random numbers.
        recompute: keep only what each layer is given, and run it again when its backward comes.
            Layers of a captured model run again block by block.
        num_slices: how many slices a microbatch has.

    Attributes:
        carries: keys of what layers leave for the next slice.
        formers: for all that runs these layers so that they can run again.
        recomputes: as ``recompute``.
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
        self.recomputes = recompute
        self._calls = [call_of(layer, num_slices) for layer in layers]
        self.carries = [key for _, key in self._calls if key is not None]
        self.formers = Formers()
        modules = [layer.module for layer in layers]
        self._units = [
            (start, RecomputedTogether(modules[start:stop])) for start, stop in units_of(modules)
        ]
        self._modules = modules
        self._were_plain: tuple[object, bool] = None, False
        self._plain = frozenset(
            place
            for place, (layer, (_, carry)) in enumerate(zip(layers, self._calls, strict=True))
            if carry is None and not layer.stashes and not layer.recalls
        )

    def are_plain(self) -> bool:
        """Whether the layers need nothing but to be called in turn: none draws, recalls, stashes,
        carries or prepares to run again."""
        # Asked before every forward, and mostly answered as before. The number of changes is read
        # first, since other threads may change which layers are quiet meanwhile.
        depends_on = self._streams.num_changes, [module.training for module in self._modules]
        if self._were_plain[0] != depends_on:
            self._were_plain = depends_on, self._find_plain()
        return self._were_plain[1]

    def _find_plain(self) -> bool:
        return (
            len(self._plain) == len(self._layers)
            and not self.recomputes
            and all(
                self._streams.is_quiet(index, module.training)
                for index, module in enumerate(self._modules, self._first_layer)
            )
        )

    def run(
        self, value: Any, skips: dict[str, Skip], where: Where, again: bool
    ) -> tuple[Any, bool]:
        """The output of the last layer, and whether any drew.

        Recalled skips leave ``skips``, stashed ones join it.

        Args:
            value: the input of the first.
            skips: what earlier stages, or slices, left.
            where: for random streams.
            again: the whole stage will run again, so no layer needs to prepare for that.
        """
        if self.recomputes and torch.is_grad_enabled() and not again:
            return self._run_units(value, skips, where)
        drew = False
        for place, layer in enumerate(self._layers):
            index = self._first_layer + place
            if place in self._plain and self._streams.is_quiet(index, layer.module.training):
                # Nearly all layers, every time: looking for skips costs several times as much.
                value = layer.module(value)
                continue
            value, drew_too = self._pass(place, self._in_stream(place, where), value, skips)
            drew = drew or drew_too
        return value, drew

    def _run_units(self, value: Any, skips: dict[str, Skip], where: Where) -> tuple[Any, bool]:
        drew = False
        kept: dict[int, Tensor] = {}
        for start, unit in self._units:
            places = range(start, start + len(unit.modules))
            run = in_turn([self._in_stream(place, where) for place in places])
            run = unit.beside(recomputed(unit.modules, run, kept, self.formers))
            value, drew_too = self._pass(start, run, value, skips)
            drew = drew or drew_too
        # What leaves the stage may be overwritten; what will run again must not.
        output = tree.replace(
            Tensor, lambda leaf: copy_of(leaf) if id(leaf) in kept else leaf, value
        )
        return output, drew

    def _pass(self, place: int, run: Run, value: Any, skips: dict[str, Skip]) -> tuple[Any, bool]:
        """Give a layer what it recalls, and take what it stashes."""
        layer, (_, carry) = self._layers[place], self._calls[place]
        keys = (*layer.recalls, carry) if carry in skips else layer.recalls
        recalled = {key: skips.pop(key).taken(key) for key in keys}
        value, drew, stashed = run(value, recalled)
        skips.update((key, Skip.of(skip)) for key, skip in stashed.items())
        return value, drew

    def _in_stream(self, place: int, where: Where) -> Run:
        layer, (call, _), index = self._layers[place], self._calls[place], self._first_layer + place

        def run(value: Any, recalled: dict[str, Any]) -> tuple[Any, bool, dict[str, Any]]:
            mode = layer.module.training
            with self._streams.stream(index, mode, *where) as stream:
                value, stashed = call(layer, value, recalled)
            self._streams.learn(index, mode, stream)
            return value, stream is not None and stream.drew, stashed

        return run
