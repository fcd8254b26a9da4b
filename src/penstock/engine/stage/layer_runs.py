"""Running a stage's layers in turn, each in its random stream and with its skips."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
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


_HOOKS_OF_ALL = (
    hooks_of_all._global_forward_pre_hooks, hooks_of_all._global_forward_hooks,
    hooks_of_all._global_backward_pre_hooks, hooks_of_all._global_backward_hooks,
)  # fmt: skip


# Others replace these for all modules.
_CALL, _LINEAR_FORWARD = nn.Module.__call__, nn.Linear.forward


def _linear(parameters: Mapping[str, Any], value: Tensor) -> Tensor:
    """What ``nn.Linear`` does, without looking for its parameters as for any attribute."""
    return F.linear(value, parameters["weight"], parameters["bias"])


class DirectCalls(NamedTuple):
    """How layers that need nothing but to be called are called in one minibatch.

    Attributes:
        layers: each with what a call of it comes to; torch looks for hooks before every call, in
            frames that take longer, between kernels, than those of all else here.
        only_reads: whether the first one is known neither to overwrite what it is given nor to give
            it a gradient of other strides, so that it may be given the leaf where that will be.
    """

    layers: Sequence[tuple[nn.Module, Callable[[Any], Any]]]
    only_reads: bool

    @classmethod
    def of(cls, layers: Iterable[nn.Module]) -> DirectCalls:
        """Look at layers as they are now."""
        # A profiler of Python's calls, torch's with modules as well, is to see layers by name.
        heard = any(_HOOKS_OF_ALL) or sys.getprofile() is not None
        calls = [(layer, layer if heard else _direct(layer)) for layer in layers]
        return cls(calls, getattr(calls[0][1], "func", None) is _linear)

    def run(self, value: Any) -> Any:
        """The output of the last layer."""
        for _layer, call in self.layers:  # what names errors looks for the layer in this frame
            value = call(value)
        return value


def _direct(layer: nn.Module) -> Callable[[Any], Any]:
    """What a call of a layer comes to, but for hooks of all modules."""
    if (
        type(layer).__call__ is not _CALL
        or layer._compiled_call_impl is not None
        or layer._forward_pre_hooks
        or layer._forward_hooks
        or layer._backward_pre_hooks
        or layer._backward_hooks
    ):
        return layer
    is_torchs = type(layer) is nn.Linear and nn.Linear.forward is _LINEAR_FORWARD
    # A weight that somebody computes stands in its place as a plain attribute.
    has_own = layer._parameters.keys() == {"weight", "bias"}
    if is_torchs and has_own and vars(layer).keys().isdisjoint({"forward", "weight", "bias"}):
        return partial(_linear, layer._parameters)
    return layer.forward


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
        self._direct: tuple[object, DirectCalls | None] = None, None
        self._plain = frozenset(
            place
            for place, (layer, (_, carry)) in enumerate(zip(layers, self._calls, strict=True))
            if carry is None and not layer.stashes and not layer.recalls
        )

    def direct_calls(self, step: int) -> DirectCalls | None:
        """How the layers are called if they need nothing but that, in turn: none draws, recalls,
        stashes, carries or prepares to run again.

        Who listens to them is looked at where a minibatch begins.
        """
        # The number of changes is read first: other threads may change which are quiet meanwhile.
        known_by = step, self._streams.num_changes, [own.training for own in self._modules]
        if self._direct[0] != known_by:
            are_plain = self._are_plain()
            self._direct = known_by, DirectCalls.of(self._modules) if are_plain else None
        return self._direct[1]

    def forget(self) -> None:
        """Between minibatches, hooks may come and go."""
        self._direct = None, None

    def _are_plain(self) -> bool:
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
