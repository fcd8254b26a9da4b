"""From what a caller gives to a minibatch cut into microbatches, and copied for its ranks.

A first layer may work in place, and a loader may use the same memory for its next batch: neither
must reach the other. So every microbatch is copied when the caller gives it, once: in main memory
where it stays there, or straight to the device of the rank. Where the caller waits until all is
done, inputs in main memory are copied when the first stage comes to them, so that it begins with
the first as soon as that is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from penstock.base.errors import InputError, StageError
from penstock.engine.device.accelerators import is_on_host
from penstock.engine.device.crossing import copy_of, moved
from penstock.engine.device.queue import DeviceQueue, Landing
from penstock.engine.model import microbatches, tree
from penstock.engine.model.batches import IgnoredLabels, plain
from penstock.engine.model.microbatches import Microbatches, Weighting
from penstock.engine.model.replay import autocast_here
from penstock.engine.run.digests import data_digest, modes_of
from penstock.engine.run.layout import Layout
from penstock.engine.run.minibatch import FrameListener, Minibatch, StreamPosition
from penstock.engine.run.recipe import Recipe
from penstock.planning.plans import Plan


class Giver:
    """Copies microbatches where they are."""

    def given(self, value: Any) -> tuple[Any, torch.Event | None]:
        """A microbatch (or slice) as a rank gets it, and when it is there: ``None`` if it is, or if
        it is behind what the caller has asked of its device.

        Raises:
            StageError: there is no memory for it.
        """
        return _replaced(copy_of, value), None

    def settle(self) -> None:
        """Return when the caller may overwrite all that was given."""


class DeviceGiver(Giver):
    """Copies microbatches to a device.

    Args:
        device: of the ranks that compute with them.
        names: how errors name these ranks' stage and what it is given.
    """

    def __init__(self, device: torch.device, names: str) -> None:
        self._device = device
        self._landing = None if is_on_host(device) else Landing(device)
        self._names = names

    def given(self, value: Any) -> tuple[Any, torch.Event | None]:
        try:
            here = _replaced(self._copied, value)
        except torch.OutOfMemoryError as error:
            raise StageError(f"{self._names}: {type(error).__name__}: {error}") from error
        return here, None if self._landing is None else self._landing.moment()

    def _copied(self, tensor: Tensor) -> Tensor:
        if tensor.device != self._device:
            landing = self._landing
            return moved(tensor, self._device) if landing is None else landing.landed(tensor)
        # On an accelerator by the caller's own stream, behind which ranks begin a minibatch.
        return copy_of(tensor)

    def settle(self) -> None:
        if self._landing is not None:
            self._landing.settle()


def _replaced(copied: Callable[[Tensor], Tensor], value: Any) -> Any:
    if not torch.is_inference_mode_enabled():
        return tree.replace(Tensor, copied, value)
    # A copy made in inference mode could not be used for training.
    with torch.inference_mode(False):
        return tree.replace(Tensor, copied, value)


@dataclass(frozen=True)
class Cutter:
    """Cuts minibatches, in the thread of the caller: whose autocast holds for them is read here.

    Attributes:
        num_microbatches: as the plan says; with fewer rows there are fewer.
        num_slices: how many slices a microbatch has.
        weighting: how much each microbatch counts.
        fills_up: whether there must be as many all the same, because every copy of a stage must
            have something to do, or it would not be updated.
        compares: whether other ranks, in other processes, must be given the same data.
        modules: those that must be in the same modes in other processes.
        gives_inputs: copies inputs for the ranks of this process that compute with them; ``None``
            if there are none.
        gives_targets: likewise.
        ignored_labels: looks whether microbatches that count by rows have labels that count for
            nothing.
        lends: whether ranks may be given inputs of callers who wait: all is in main memory.
    """

    num_microbatches: int
    num_slices: int
    weighting: Weighting
    fills_up: bool
    compares: bool = False
    modules: Sequence[nn.Module] = ()
    gives_inputs: Giver | None = field(default_factory=Giver)
    gives_targets: Giver | None = field(default_factory=Giver)
    ignored_labels: IgnoredLabels = field(default_factory=IgnoredLabels)
    lends: bool = False

    def to_train(
        self,
        inputs: Any,
        targets: Any,
        *,
        step: int,
        share: float = 1.0,
        updates: bool = True,
        waits: bool = False,
    ) -> Minibatch:
        """A minibatch to train on.

        Args:
            waits: whether whoever gives it waits until it is done, so that inputs in main memory
                need no copies before ranks come to them.

        Raises:
            InputError: inputs and targets do not fit together.
        """
        inputs, targets = plain(inputs, "inputs"), plain(targets, "targets")
        parts, wanted = self._parts_of(inputs, targets)
        weights = self._weights(targets, wanted)
        if self.fills_up:
            first = range(self.num_slices)
            for _ in range(len(parts) // self.num_slices, self.num_microbatches):
                parts += [parts[index] for index in first]
                wanted += [wanted[index] for index in first]
                weights += [0.0 for _ in first]  # they count for nothing
        return self._given(
            step,
            parts,
            wanted,
            lends=waits and self.lends,
            weights=weights,
            share=share,
            updates=updates,
            digests=(self._digest(inputs), self._digest(targets)),
            modes=modes_of(self.modules),
        )

    def _given(
        self,
        step: int,
        parts: Sequence[Any],
        wanted: Sequence[Any] = (),
        lends: bool = False,
        **options: Any,
    ) -> Minibatch:
        """A minibatch of what was cut, as ranks get it."""
        parts, inputs_moments = _copied(parts, None if lends else self.gives_inputs)
        wanted, targets_moments = _copied(wanted, self.gives_targets)
        self._settle()
        options = {"num_slices": self.num_slices, "autocast": autocast_here(), **options}
        return Minibatch(
            step,
            parts,
            wanted,
            inputs_moments=inputs_moments,
            targets_moments=targets_moments,
            lent=lends,
            **options,
        )

    def _parts_of(self, inputs: Any, targets: Any) -> tuple[list[Any], list[Any]]:
        """Microbatches, or slices of them, of inputs and targets that fit together."""
        if isinstance(inputs, Microbatches) != isinstance(targets, Microbatches):
            raise InputError("give both inputs and targets as penstock.Microbatches, or neither")
        if isinstance(inputs, Microbatches):
            count = self._count(inputs)
        else:
            rows = microbatches.num_rows(inputs, "inputs")
            others = microbatches.num_rows(targets, "targets")
            if rows != others:
                raise InputError(f"inputs have {rows} rows, but targets have {others}")
            count = min(self.num_microbatches, rows)
        parts, wanted = _cut(inputs, "inputs", count), _cut(targets, "targets", count)
        if self.num_slices > 1:
            _check_lengths(parts, wanted)
            parts, wanted = self._slices(parts, "inputs"), self._slices(wanted, "targets")
        return parts, wanted

    def frame(
        self,
        frame: Any,
        target: Any,
        *,
        number: int,
        learns: bool,
        listener: FrameListener,
        autocast: Mapping[str, torch.dtype],
    ) -> Minibatch:
        """One frame of a live stream, which is a minibatch of one microbatch; which one in the
        stream is known when it enters.

        Args:
            frame: what the first stage takes; ``None`` where that is in another process.
            target: what the frame should give, ``None`` if nobody says.
            number: what the caller knows it by.
            learns: whether anything may be learned from it.
            listener: wants to know what the model gives.
            autocast: as for the minibatch.

        Raises:
            InputError: the frame or the target holds what is sparse or nested.
        """
        inputs, inputs_moments = _whole(frame, "inputs", self.gives_inputs)
        targets, targets_moments = _whole(target, "targets", self.gives_targets)
        self._settle()
        return Minibatch(
            -1,
            inputs,
            targets,
            [1.0],
            autocast=autocast,
            inputs_moments=inputs_moments,
            targets_moments=targets_moments,
            learns=learns,
            listener=listener,
            frame=number,
        )

    def _settle(self) -> None:
        for giver in (self.gives_inputs, self.gives_targets):
            if giver is not None:
                giver.settle()

    def minibatches(
        self, pairs: Iterable[tuple[Any, Any]], first_step: int
    ) -> Iterator[tuple[Minibatch, StreamPosition]]:
        """Minibatches to train on, with whether more follow, or what ended the loader behind them
        if it was an error.

        Args:
            pairs: (inputs, targets). They are cut at once: a loader may use the same memory for the
                next.
            first_step: the step number of the first.
        """
        return with_more(
            self.to_train(inputs, targets, step=first_step + number)
            for number, (inputs, targets) in enumerate(pairs)
        )

    def judged(
        self, pairs: Iterable[tuple[Any, Any]], *, step: int
    ) -> Iterator[tuple[Minibatch, float]]:
        """Minibatches of which only the loss is wanted, and how many terms that has; each knows
        whether more follow, which other processes compare.

        Raises:
            InputError: inputs and targets do not fit together.
        """
        held: list[tuple[Minibatch, float]] = []
        for inputs, targets in pairs:
            # Cut at once: a loader may use the same memory for the next.
            following = self._to_judge(inputs, targets, step)
            for minibatch, num_terms in held:
                yield replace(minibatch, more_to_judge=True), num_terms
            held = [following]
        yield from held

    def _to_judge(self, inputs: Any, targets: Any, step: int) -> tuple[Minibatch, float]:
        inputs, targets = plain(inputs, "inputs"), plain(targets, "targets")
        parts, wanted = self._parts_of(inputs, targets)
        weights = self._weights(targets, wanted)
        num_terms = sum(self.weighting.terms(wanted, self.num_slices > 1))
        digests = self._digest(inputs), self._digest(targets)
        options: dict[str, Any] = {"weights": weights, "trains": False, "digests": digests}
        return self._given(step, parts, wanted, **options), num_terms

    def _weights(self, targets: Any, parts: list[Any]) -> list[float]:
        """How much each microbatch of some targets counts, or each slice."""
        if self.weighting.counts_rows:
            self.ignored_labels.look(targets, parts)
            if type(targets) is Tensor and self.num_slices == 1:
                return [*microbatches.shares_of_rows(targets.shape[0], len(parts))]
        return self.weighting.of(parts, self.num_slices > 1)

    def to_evaluate(self, inputs: Any, *, step: int) -> Minibatch:
        """A minibatch of which only outputs are wanted."""
        inputs = plain(inputs, "inputs")
        whole = _cut(inputs, "inputs", self._count(inputs))
        parts = self._slices(whole, "inputs")
        return self._given(step, parts, trains=False, digests=(self._digest(inputs), 0))

    def _digest(self, value: Any) -> int:
        return data_digest(value) if self.compares else 0

    def _slices(self, parts: list[Any], which: str) -> list[Any]:
        return [
            piece
            for part in parts
            for piece in microbatches.split_sequence(part, self.num_slices, which, copied=False)
        ]

    def _count(self, inputs: Any) -> int:
        """How many microbatches these inputs make."""
        if isinstance(inputs, Microbatches):
            if not inputs:
                raise InputError("inputs hold no microbatch")
            return len(inputs)
        return min(self.num_microbatches, microbatches.num_rows(inputs, "inputs"))


def _check_lengths(inputs: list[Any], targets: list[Any]) -> None:
    for pair in zip(inputs, targets, strict=True):
        length, other = map(microbatches.sequence_length, pair, ("inputs", "targets"))
        if length != other:
            raise InputError(f"inputs have {length} positions, but targets have {other}")


def _cut(value: Any, which: str, count: int) -> list[Any]:
    """Microbatches, which are views of what the caller has given."""
    if not isinstance(value, Microbatches):
        return microbatches.split(value, count, copied=False)
    if len(value) != count:
        raise InputError(f"there are {count} microbatches of inputs, but {len(value)} of {which}")
    for index, part in enumerate(value):
        tensors = tree.tensors(part)
        if not tensors:
            raise InputError(f"microbatch {index} of the {which} holds no tensor")
        microbatches.check_dense(tensors, which)
    return list(value)


def _whole(value: Any, which: str, giver: Giver | None) -> tuple[list[Any], list[torch.Event]]:
    """A frame, or its target, as ranks get it; ``None`` where there is none."""
    if value is None:
        return [None], []
    microbatches.check_dense(tree.tensors(value), which)
    if giver is None:
        return [value], []
    here, moment = giver.given(value)
    return [here], [] if moment is None else [moment]


def _copied(
    parts: Sequence[Any], giver: Giver | None
) -> tuple[Sequence[Any], Sequence[torch.Event]]:
    """Microbatches or slices as ranks get them, and when each of them is there, if that is later
    than now."""
    if giver is None:
        return parts, ()
    pairs = [giver.given(part) for part in parts]
    moments = [moment for _, moment in pairs if moment is not None]
    return [value for value, _ in pairs], moments


def with_more(minibatches: Iterable[Minibatch]) -> Iterator[tuple[Minibatch, StreamPosition]]:
    """Each minibatch, with whether more follow; with the last one, what ended them if it was an
    error. Nothing is yielded if that comes first."""
    held: list[Minibatch] = []
    failure: Exception | None = None
    try:
        for minibatch in minibatches:
            if held:
                yield held.pop(), StreamPosition(in_loop=True, more_follow=True)
            held.append(minibatch)
    except Exception as error:
        if not held:
            raise
        failure = error
    if held:
        yield held.pop(), StreamPosition(in_loop=True, failure=failure)


def cutter_of(
    plan: Plan,
    layout: Layout,
    recipe: Recipe,
    devices: Mapping[int, torch.device],
    queues: Mapping[int, DeviceQueue],
) -> Cutter:
    """The cutter for the ranks of this process, which copies what they are given.

    Args:
        devices: of the seats of this process, by their numbers.
        queues: their work, if any of them is an accelerator.
    """
    last = len(plan.stages) - 1
    here = [
        {
            devices[seat]
            for rank in plan.placement.ranks_of(stage)
            for seat in layout.seats_of(rank)
            if seat in devices
        }
        for stage in (0, last)
    ]
    return Cutter(
        plan.num_microbatches,
        layout.num_slices,
        recipe.weighting,
        plan.placement.weight_copies > 1 and recipe.updates == "minibatch",
        gives_inputs=_giver(here[0], queues, "stage 0, given its inputs"),
        gives_targets=_giver(here[1], queues, f"stage {last}, given its targets"),
        lends=not queues,
    )


def _giver(
    devices: set[torch.device], queues: Mapping[int, DeviceQueue], names: str
) -> Giver | None:
    if not devices:
        return None  # other processes compute with them
    # Which copy of a stage gets a microbatch is known when it is there; then its rank fetches it.
    if not queues or len(devices) > 1:
        return Giver()
    (device,) = devices
    return DeviceGiver(device, names)
