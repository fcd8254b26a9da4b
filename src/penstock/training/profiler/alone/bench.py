"""All measurements of a model's layers, for one sample after another: the times of their passes,
the memory that they keep or need while they run, whether they draw random numbers, and what is odd.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from penstock.core.expert_part import ExpertPart
from penstock.engine.device.memory import gauge_of
from penstock.engine.model import tree
from penstock.engine.model.randomness import RandomStream
from penstock.engine.model.spine import NamedLayer
from penstock.engine.stage.deferral import Deferral, undeferred_parameters
from penstock.engine.stage.microbatch_graph import MicrobatchGraph, cut, edges
from penstock.engine.tensor.divided_layers import DROPOUTS
from penstock.engine.tensor.parts import FoundPart
from penstock.training.profiler.alone.conditions import Sample, clock_of
from penstock.training.profiler.alone.experts import ExpertsWatch
from penstock.training.profiler.alone.parts import PartSizes, PartsWatch, timed_shares
from penstock.training.profiler.alone.passes import (
    HandedOn,
    JudgedRun,
    RunLayer,
    handed_on,
    runs_of,
    without_skips,
)
from penstock.training.profiler.alone.rounds import (
    WARM_UP,
    LayerTimes,
    Overheads,
    measure_overheads,
    measure_rounds,
    times_of,
)

Progress = Callable[[int, int], None]
"""Called with (done, total)."""


class Measured(NamedTuple):
    """The measurements of one layer with one microbatch.

    Attributes:
        times: seconds of its passes.
        footprint: bytes that it keeps for its backward.
        handed_on: bytes that it gives to later layers.
        workspace: bytes that it needs only while it runs.
        flags: what is odd about that, in sentences.
        draws: whether it draws random numbers but by dropout of torch's.
        parts: sizes of each part of it that tensor ranks can share.
    """

    times: LayerTimes
    footprint: Footprint
    handed_on: HandedOn
    workspace: int
    flags: tuple[str, ...]
    draws: bool
    parts: tuple[PartSizes, ...] = ()
    experts: tuple[ExpertPart, ...] = ()


class Bench:
    """Measures a model's layers with any number of samples.

    Args:
        parts: the parts of each layer that tensor ranks can share.
        repeats: rounds that count, for each sample.
        num_samples: how many samples there will be, for ``progress``.
        progress: called after each round.

    Attributes:
        clock: the clock of the device.
        num_rounds: of the sample that had fewest; ``repeats`` unless something ended them.
        interrupted: whether somebody has ended them; no more should be measured then.
    """

    def __init__(
        self,
        layers: Sequence[NamedLayer],
        parts: Sequence[Sequence[FoundPart]],
        device: torch.device,
        repeats: int,
        num_samples: int,
        progress: Progress | None,
    ) -> None:
        self.clock = clock_of(device)
        self._layers = layers
        self._parts = parts
        self._gauge = gauge_of(device)
        self._repeats = self.num_rounds = repeats
        self.interrupted = False
        self._overheads = measure_overheads(self.clock, device)
        self._num_samples = num_samples
        self._num_measured = 0
        self._done = 0
        self._progress = progress
        modules = [module for layer in layers for module in layer.module.modules()]
        self._undeferred = undeferred_parameters(modules)
        self._trains = [
            any(parameter.requires_grad for parameter in layer.module.parameters())
            for layer in layers
        ]

    def measure(self, sample: Sample) -> list[Measured]:
        """Measure every layer with a sample."""
        runs = runs_of(self._layers, sample.loss, sample.targets)
        given: dict[int, HandedOn] = {}
        draws: dict[int, bool] = {}
        experts = [ExpertsWatch(layer, self.clock.now) for layer in self._layers]
        watched = [
            partial(self._watched, given, draws, sample, experts, *pair) for pair in enumerate(runs)
        ]
        modules = [layer.module for layer in self._layers]
        watches = [
            PartsWatch(*pair, self.clock.now) for pair in zip(modules, self._parts, strict=True)
        ]
        judge = JudgedRun.of(self._layers, sample)
        footprints = measure_footprints(modules, watched, sample.inputs, watches, judge)
        shares = timed_shares(self._layers, self._parts, runs, sample.inputs, self.clock)
        workspaces = [0] * len(runs)
        if self._gauge is not None:
            workspaces = measure_workspaces(runs, sample.inputs, self._gauge)
        times = self._times(runs, sample)
        handed = [given[index] for index in range(len(runs))]
        flags = self._flags(times)
        drew = [draws[index] for index in range(len(runs))]
        parts = [
            tuple(
                part._replace(share=share)
                for part, share in zip(watch.sizes(self.clock.seconds), own, strict=True)
            )
            for watch, own in zip(watches, shares, strict=True)
        ]
        mixtures = [
            watch.parts(self.clock.seconds, own.forward + own.backward)
            for watch, own in zip(experts, times, strict=True)
        ]
        columns = zip(
            times, footprints, handed, workspaces, flags, drew, parts, mixtures, strict=True
        )
        return [Measured(*row) for row in columns]

    def _times(self, runs: Sequence[RunLayer], sample: Sample) -> list[LayerTimes]:
        rounds = measure_rounds(
            runs, sample.inputs, self.clock, self._repeats, self._undeferred, self._tell
        )
        self.num_rounds = min(self.num_rounds, rounds.num_rounds)
        self.interrupted = rounds.interrupted
        self._num_measured += 1
        if self._done < self._num_measured * self._rounds_of_sample:
            self._advance(self._num_measured * self._rounds_of_sample)
        return times_of(rounds, self._overheads, self._trains, self.clock.tick_seconds)

    def _watched(
        self,
        given: dict[int, HandedOn],
        draws: dict[int, bool],
        sample: Sample,
        experts: Sequence[ExpertsWatch],
        index: int,
        run: RunLayer,
        value: Any,
    ) -> Any:
        with experts[index], watching_draws(self._layers[index].module) as stream:
            output = run(value)
        draws[index] = stream.drew
        is_loss = sample.loss is not None and index == len(self._layers) - 1
        given[index] = handed_on(self._layers, index, output, is_loss)
        return output

    def _flags(self, times: Sequence[LayerTimes]) -> Iterable[tuple[str, ...]]:
        for own, trains in zip(times, self._trains, strict=True):
            yield tuple(flags_of(own, trains, self._overheads))

    @property
    def _rounds_of_sample(self) -> int:
        return WARM_UP + self._repeats

    def _tell(self) -> None:
        self._advance(self._done + 1)

    def _advance(self, done: int) -> None:
        self._done = done
        if self._progress is not None:
            self._progress(done, self._rounds_of_sample * self._num_samples)


_NOBODY = -1


class Footprint(NamedTuple):
    """Bytes that one layer keeps of one microbatch.

    Attributes:
        activation: what autograd keeps from forward to backward and no earlier layer keeps.
        loss: of these, what the loss behind the last layer keeps: it does not run again with it.
        masks: of these, masks of attention.
        held_input: its input, if neither it nor an earlier layer keeps that anyway. A stage that
            begins with the layer holds it, because the gradient is handed back by it.
        weight_kept: what stays from the input gradient until the weight gradient of a split
            backward.
        input_shape: shapes and dtypes of its input, in words.
        by_rows: whether all that it is given has rows, more than one.
    """

    activation: int
    loss: int
    masks: int
    held_input: int
    weight_kept: int
    input_shape: str
    by_rows: bool


def measure_footprints(
    modules: Sequence[nn.Module],
    runs: Sequence[RunLayer],
    inputs: Any,
    watches: Sequence[PartsWatch],
    judge: JudgedRun | None,
) -> list[Footprint]:
    """Run layers one after the other, and measure what each keeps.

    Args:
        runs: the same as functions, cut off from each other; the last may go on to the loss.
        inputs: the first layer's; they are not overwritten.
        watches: of each layer's parts.
        judge: the last layer and the loss, if there is one.
    """
    owners = {
        tensor.untyped_storage()._cdata: _NOBODY
        for module in modules
        for tensor in (*module.parameters(), *module.buffers())
    }
    alive, values = [], [_cloned(inputs)]
    rows = tree.tensors(inputs)[0].shape[:1]
    for index, run in enumerate(runs):
        watch = watches[index]

        def keep(tensor: Tensor, index: int = index, watch: PartsWatch = watch) -> Tensor:
            address = tensor.untyped_storage()._cdata  # on meta no storage has another
            if address not in owners:
                owners[address] = index
                watch.keep(tensor)
            return tensor

        _, value = cut(values[index], index > 0)
        watch.given(value)
        with watch, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            values.append(run(value))
        alive.append(value)  # so that no storage address is used twice
    held = {address for address, owner in owners.items() if owner == _NOBODY}
    of_loss = 0 if judge is None else min(_loss_kept(judge, alive[-1], held), watch.kept_bytes)
    return [
        Footprint(
            watches[index].kept_bytes,
            of_loss if index == len(runs) - 1 else 0,
            _masks_kept(values[index + 1], owners, index),
            sum(
                size
                for address, size in _storages(tree.tensors(values[index])).items()
                if owners.get(address, _NOBODY) < index
            ),
            _weight_kept(modules[index], run, values[index], index > 0),
            tree.shapes(without_skips(values[index])),
            _have_rows(values[index], rows),
        )
        for index, run in enumerate(runs)
    ]


def _masks_kept(value: Any, owners: Mapping[int, int], layer: int) -> int:
    """Bytes of masks of attention that a layer keeps behind its output.

    Args:
        owners: of each storage that is kept, by its address, the layer that keeps it.
    """
    masks = _storages(_masks_behind(value)).items()
    return sum(size for address, size in masks if owners.get(address) == layer)


def _masks_behind(value: Any) -> Iterator[Tensor]:
    """The masks that calls of attention in a value's graph keep for their backwards."""
    waiting = [tensor.grad_fn for tensor in tree.tensors(value) if tensor.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        for name in ("_saved_attn_mask", "_saved_attn_bias"):  # of torch's kernels, by their names
            mask = getattr(node, name, None)
            if isinstance(mask, Tensor):
                yield mask
        others = {other for other, _ in node.next_functions if other is not None} - seen
        seen |= others
        waiting += others


def _loss_kept(judge: JudgedRun, value: Any, held: Collection[int]) -> int:
    """Bytes that the loss keeps of what the last layer makes of a value.

    Args:
        held: addresses of storages that are there anyway.
    """
    _, outputs = cut(without_skips(judge.last(_cloned(value))), wants_gradient=True)
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = judge.loss(outputs, judge.targets)
    storages = _storages(saved)
    del result
    return sum(size for address, size in storages.items() if address not in held)


def _have_rows(value: Any, rows: torch.Size) -> bool:
    """Whether all tensors of a value have as many rows, more than one."""
    shapes = [tensor.shape[:1] for tensor in tree.tensors(without_skips(value))]
    return rows > (1,) and all(shape == rows for shape in shapes)


def _weight_kept(module: nn.Module, run: RunLayer, value: Any, wants_gradient: bool) -> int:
    _, own = cut(_cloned(value), wants_gradient)
    deferral = Deferral(undeferred_parameters(module.modules()))
    with deferral:
        output = run(own)
    pairs = [
        (edge, torch.ones_like(tensor))
        for edge, tensor in zip(edges(output), tree.flatten(output)[0], strict=True)
        if edge is not None
    ]
    if pairs:
        ends, seeds = zip(*pairs, strict=True)
        with deferral:
            torch.autograd.backward(ends, seeds)
        deferral.settle()
    return sum(_storages(deferral.held()).values())


def _cloned(value: Any) -> Any:
    return tree.replace(Tensor, Tensor.clone, value)


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage._cdata: storage.nbytes() for storage in storages}


class MemoryGauge(Protocol):
    """Tells how many bytes are taken, and how many have been at most."""

    def taken(self) -> int:
        """The bytes that are taken now."""
        ...

    def peak(self) -> int:
        """The most bytes since ``forget_peak``."""
        ...

    def forget_peak(self) -> None:
        """Begin anew with what is taken now."""
        ...


def measure_workspaces(runs: Sequence[RunLayer], inputs: Any, gauge: MemoryGauge) -> list[int]:
    """Measure the bytes that every layer's forward or backward takes beyond what was taken before
    and what is left after it, whichever is more."""
    value, graphs, workspaces = tree.replace(Tensor, Tensor.clone, inputs), [], []
    for index, run in enumerate(runs):
        leaves, value = cut(value, index > 0)
        before = _begin(gauge)
        value = run(value)
        workspaces.append(_beyond(gauge, before))
        graphs.append(MicrobatchGraph(leaves, {}, edges(value), {}, False, None))
    gradients: Sequence[Tensor | None] = [
        torch.ones_like(leaf) if isinstance(leaf, Tensor) else None
        for leaf in tree.flatten(value)[0]
    ]
    del value
    for index in reversed(range(len(graphs))):
        graph = graphs.pop()
        before = _begin(gauge)
        gradients = graph.backward(gradients, {}).inputs
        workspaces[index] = max(workspaces[index], _beyond(gauge, before))
    return workspaces


def _begin(gauge: MemoryGauge) -> int:
    gauge.forget_peak()
    return gauge.taken()


def _beyond(gauge: MemoryGauge, before: int) -> int:
    return max(0, gauge.peak() - max(before, gauge.taken()))


_SEED = 0


@contextmanager
def watching_draws(module: nn.Module) -> Iterator[RandomStream]:
    """Within, ``drew`` of the stream tells whether a module draws but by dropout of torch's, of
    which tensor ranks know to keep the part of their rows."""
    with RandomStream(_SEED) as stream, forgetting_dropouts(module, stream):
        yield stream


class Draws(Protocol):
    """Notices draws of random numbers: ``drew`` says whether any operation drew."""

    drew: bool


@contextmanager
def forgetting_dropouts(module: nn.Module, stream: Draws) -> Iterator[None]:
    """Within, ``drew`` of a stream stays as it is while dropout layers of torch's draw."""
    before: list[bool] = []
    known = [layer for layer in module.modules() if isinstance(layer, DROPOUTS)]
    hooks = [
        layer.register_forward_pre_hook(lambda *_: before.append(stream.drew)) for layer in known
    ]

    def forget(*_: object) -> None:
        stream.drew = before.pop()

    hooks += [layer.register_forward_hook(forget) for layer in known]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


_WIDE = 0.15
_FAR_BELOW = 0.5


def flags_of(times: LayerTimes, trains: bool, overheads: Overheads) -> Iterator[str]:
    """A sentence for each thing about a layer that somebody should look at.

    Args:
        times: the layer's.
        trains: whether the layer has parameters that need gradients.
        overheads: what measuring a layer adds to its times.
    """
    if trains and not times.backward:
        yield "it has parameters, but no gradient comes to it"
    if times.forward + times.backward < overheads.forward.of(1) + overheads.backward.of(1):
        yield "it takes less time than measuring it does"
        return
    # What was taken off for measuring may have been too much.
    if trains and 0 < times.backward < _FAR_BELOW * times.forward - overheads.backward.of(1):
        share = times.backward / times.forward
        yield (
            f"its backward takes {share:.0%} of its forward, which is odd for a layer with "
            "parameters: is something detached?"
        )
    if times.spread > _WIDE:
        yield f"its times spread by {times.spread:.0%}: a busy machine? more repeats help"
