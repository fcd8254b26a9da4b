"""Watches what torch dispatches while a model runs on meta: which kernels (``KernelCounter``, cut
into passes by a ``KernelClock``), and how much memory is taken (``MetaGauge``); ``count_updates``
does so for optimizers.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.core.pricing import Kernel, KernelPace, seconds_of_each
from penstock.engine.model import tree
from penstock.engine.model.modes import Args, DispatchMode, Named
from penstock.engine.model.optimizer_factory import OptimizerFactory
from penstock.engine.model.spine import NamedLayer
from penstock.training.estimating.operations import kernel_of
from penstock.training.profiler.alone.overheads import (
    NamedParameters,
    OptimizerBuilder,
    Update,
    updates_of,
)
from penstock.training.profiler.alone.passes import num_bytes

META = torch.device("meta")
_ITEM = torch.ops.aten._local_scalar_dense.default
_DETACH = torch.ops.aten.detach.default
_GROUPED = torch.ops.aten._grouped_mm.default
_SAFE_SOFTMAX = torch.ops.aten._safe_softmax.default


def _shaped(func: Any, args: Any, named: dict[str, Any]) -> Any:
    """The result of products of groups, of which torch says the shape for bfloat16 only."""

    def narrow(tensor: Tensor) -> Tensor:
        return tensor.bfloat16() if tensor.is_floating_point() else tensor

    result = func(*tree.replace(Tensor, narrow, args), **tree.replace(Tensor, narrow, named))
    return result.to(named.get("out_dtype") or args[0].dtype)


def _softmax_of_masked_rows(scores: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """The kernels of ``_safe_softmax``: a row of which nothing is left is 0."""
    aten = torch.ops.aten
    shares = aten._softmax(scores if dtype is None else scores.to(dtype), dim, False)
    masked = aten.all(aten.isneginf(scores), dim, True)
    result: Tensor = aten.where(masked, aten.zeros_like(shares), shares)
    return result


def on_meta(value: Any) -> Any:
    """A value whose tensors have shapes only."""
    return tree.replace(
        Tensor,
        lambda tensor: tensor if tensor.is_meta else torch.empty_like(tensor, device=META),
        value,
    )


class OnMeta(DispatchMode):
    """Keeps all operations of this thread on meta, also those that name another device or take
    what a layer holds beside its weights.

    Args:
        converts: whether tensors elsewhere come to meta, too. Otherwise a number that somebody
            wants of one on meta is 1: optimizers, which scale by such numbers, run the same
            operations whatever they are; a model may not.
    """

    def __init__(self, *, converts: bool = True) -> None:
        super().__init__()
        self._converts = converts

    def call(self, func: Any, args: Args, named: Named) -> Any:
        if not self._converts:
            if func is _ITEM and args[0].is_meta:
                return torch.ones((), dtype=args[0].dtype).item()
            result = func(*args, **named)
            if any(tensor.is_meta for tensor in tree.tensors((args, named, result))):
                self.note(func, args, named, result)
            return result
        args, named = on_meta(args), on_meta(named)
        if func is _SAFE_SOFTMAX:  # torch runs it as several kernels, of which it shows one
            with self:
                return _softmax_of_masked_rows(*args, **named)
        if named.get("device") is not None:
            named["device"] = META
        result = _shaped(func, args, named) if func is _GROUPED else func(*args, **named)
        self.note(func, args, named, result)
        return result

    def note(self, func: Any, args: Any, named: dict[str, Any], result: Any) -> None:
        """Called behind each operation, with what it took and gave."""


class KernelCounter(OnMeta):
    """Lists the kernels of all operations.

    Args:
        converts: whether tensors elsewhere come to meta, too; else operations on them do not count.

    Attributes:
        kernels: as they were dispatched.
        drew: whether any operation drew random numbers.
    """

    def __init__(self, *, converts: bool = True) -> None:
        super().__init__(converts=converts)
        self.kernels: list[Kernel] = []
        self.drew = False
        self._alive: list[Any] = []

    def note(self, func: Any, args: Any, named: dict[str, Any], result: Any) -> None:
        """List the kernel, and keep its storages, so that none has the number of another."""
        if func is _DETACH:
            return  # nearly all of them are of autograd's own, and appear under a mode only
        kernel = kernel_of(func, args, named, result)
        # A fused attention could draw for dropout; where it has some, a layer of it is meant.
        draws = torch.Tag.nondeterministic_seeded in func.tags and kernel.kind != "attention"
        self.drew |= draws
        self.kernels.append(kernel)
        self._alive += [tensor.untyped_storage() for tensor in tree.tensors((args, named, result))]


class KernelClock:
    """A clock whose stamps are numbers of kernels, and whose seconds are the kernels between two
    stamps, as a ``slice``: what they take is asked in several ways.

    Args:
        counter: lists the kernels.
    """

    tick_seconds = 0.0

    def __init__(self, counter: KernelCounter) -> None:
        self._counter = counter

    def now(self) -> int:
        """How many kernels there were up to now."""
        return len(self._counter.kernels)

    def settle(self) -> None:
        """Wait for nothing."""

    def seconds(self, start: int, stop: int) -> Any:
        """The place of the kernels between two stamps."""
        return slice(start, stop)


class MetaGauge(OnMeta):
    """Tells how much memory tensors on meta would take that were made while it was active."""

    def __init__(self) -> None:
        super().__init__()
        self._taken = self._most = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def note(self, func: Any, args: Any, named: dict[str, Any], result: Any) -> None:
        """Count storages that are new."""
        for tensor in tree.tensors(result):
            storage = tensor.untyped_storage()
            if storage in self._known:
                continue
            self._known.add(storage)
            if any(
                storage._cdata == given.untyped_storage()._cdata for given in tree.tensors(args)
            ):
                continue  # of a tensor that was there before
            num_bytes = storage.nbytes()
            self._taken += num_bytes
            self._most = max(self._most, self._taken)
            weakref.finalize(storage, self._forget, num_bytes)

    def _forget(self, num_bytes: int) -> None:
        self._taken -= num_bytes

    def taken(self) -> int:
        """The bytes that are taken now."""
        return self._taken

    def peak(self) -> int:
        """The most bytes since ``forget_peak``."""
        return self._most

    def forget_peak(self) -> None:
        """Begin anew with what is taken now."""
        self._most = self._taken


def count_updates(
    layers: Sequence[NamedLayer], optimizer: OptimizerFactory | None, pace: KernelPace
) -> list[Update]:
    """The optimizer's step of every layer, without values.

    Raises:
        InputError: no layer has parameters of which the optimizer can be made.
    """

    def look(trained: Sequence[NamedParameters], builder: OptimizerBuilder) -> Iterator[Update]:
        return (_counted(own, builder, pace) for own in trained)

    return updates_of(layers, optimizer, look)


def _counted(named: NamedParameters, builder: OptimizerBuilder, pace: KernelPace) -> Update:
    fused: list[bool] = []

    def prepare(built: torch.optim.Optimizer) -> None:
        # No fused optimizer takes what is on meta.
        fused.append(any(group.get("fused") for group in built.param_groups))
        for group in built.param_groups:
            if group.get("fused"):
                group["fused"] = None

    with OnMeta(converts=False):
        built = builder.stepped(named, prepare)
    if built is None:
        return Update(0.0, 0)
    state_bytes, held = built.state_bytes, built.gradient_bytes
    built.give_gradients()
    with KernelCounter(converts=False) as counter:
        built.optimizer.step()
    kernels = counter.kernels
    if fused[0]:
        # Weights, gradients and state are read once; weights and state are written.
        moved = 2 * num_bytes([weight for _, weight in named]) + held + 2 * state_bytes
        kernels = [Kernel("pointwise", "step", "fp32", 0.0, {0: moved}, {})]
    return Update(_seconds(kernels, len(named), pace), state_bytes, held)


def _seconds(kernels: Sequence[Kernel], num_parameters: int, pace: KernelPace) -> float:
    seconds = sum(seconds_of_each(kernels, pace))
    if pace.is_host:
        return seconds
    # On an accelerator, torch's optimizers take all parameters in one call.
    launch = pace.device.efficiency.launch_seconds.value
    return seconds - launch * len(kernels) * (1 - 1 / max(num_parameters, 1))
