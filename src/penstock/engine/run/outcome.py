"""The result of a step, put together from those of the ranks: losses, outputs, when which op ran,
and how much memory ranks kept.
"""

from __future__ import annotations

import operator
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import reduce
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from penstock.core.schedule import Op
from penstock.core.schedule.op import Activations
from penstock.core.timing.spans import Row, Transfer, TransferKind
from penstock.core.timing.timeline import Timeline
from penstock.engine.device.activation_meter import ActivationMeter, KeptMemory, Saved
from penstock.engine.device.memory import gauge_of
from penstock.engine.device.queue import Stamps, happened
from penstock.engine.model import tree
from penstock.engine.stage.protocol import RunnableStage
from penstock.engine.stage.stage import Stage
from penstock.engine.weights.local_rows import rows_of
from penstock.engine.weights.store import HeldVersions
from penstock.planning.plans import Plan

if TYPE_CHECKING:
    from penstock.engine.run.drive.processes import RankReport
    from penstock.engine.run.minibatch import StepResult

Loss = Tensor | float
"""That of one microbatch; a plain number stands for one in single precision and main memory."""


class Peak(NamedTuple):
    """The most that a rank held at once during one minibatch.

    Attributes:
        activation_bytes: what stages kept for backwards, by unique storages.
        microbatches: how many had anything kept by a stage; one that two stages of the rank keep
            counts as two, and a slice as its share.
    """

    activation_bytes: int
    microbatches: float


def _held_all_the_time(stage: RunnableStage) -> Iterator[Tensor]:
    """What autograd may save of a stage that is no activation."""
    sharded = stage.sharded if isinstance(stage, Stage) else None
    experts = stage.experts if isinstance(stage, Stage) else None
    for module in stage.layer_modules:
        yield from module.buffers()
        if sharded is None:
            yield from (own for own in module.parameters() if rows_of(own) is None)
    if sharded is not None:
        yield from sharded.gathered
    if experts is not None:
        yield from (weight.rows for weight in experts.weights)


class MemoryCounter:
    """Counts one rank's stages while they work."""

    def __init__(self, stages: Mapping[int, RunnableStage]) -> None:
        self._stages = stages
        for stage in stages.values():
            if isinstance(stage, Stage) and stage.sharded is not None:
                stage.sharded.waits_for_all = (
                    True  # what comes later would be taken for activations
                )
        self._meter = ActivationMeter(
            tensor for stage in stages.values() for tensor in _held_all_the_time(stage)
        )
        self._kept: dict[tuple[int, int], KeptMemory] = {}

    def begin(self) -> None:
        """A new minibatch."""
        self._meter.reset_peak()

    def watching(
        self,
        stage: int,
        unit: int,
        instead: Callable[[Tensor], Any] | None = None,
        around: Callable[[Saved], Any] | None = None,
    ) -> AbstractContextManager[None]:
        """A context in which all that autograd saves is of a stage's microbatch, or slice of it;
        except what ``instead`` takes the place of, and as long as its wrapping holds it."""
        return self._meter.watching((stage, unit), instead, around)

    def keep(self, key: tuple[int, int], tensors: Iterable[Tensor]) -> KeptMemory:
        """Count memory for a stage and a unit as long as what this gives is held."""
        return self._meter.keep(key, tensors)

    def after(self, stage: int, unit: int) -> None:
        """Count anew what a stage holds of a microbatch, or slice, outside of autograd."""
        key = (stage, unit)
        held = self._stages[stage].held(unit)
        self._kept.pop(key, None)
        if held:
            self._kept[key] = self._meter.keep(key, held)

    def forget(self) -> None:
        """The minibatch has ended, well or not."""
        self._kept.clear()

    def peak(self, num_slices: int) -> Peak:
        """Since the minibatch began; ``num_slices``: of a microbatch."""
        return Peak(self._meter.peak_bytes, self._meter.peak_keys / num_slices)


def memory_of_ranks(
    plan: Plan, activations: Sequence[float], devices: Mapping[int, torch.device]
) -> tuple[int, ...]:
    """The memory that every rank has needed at most.

    Args:
        activations: bytes that every rank has held for backwards.
        devices: of the ranks of this process, by their numbers; an accelerator tells itself how
            much was taken there.
    """
    held = list(plan.rank_bytes)
    if plan.spill is None:
        stages_of = plan.prediction.placement.stages_of
        held = [
            sum(plan.stages[stage].state_bytes for stage in stages) + ceil(kept)
            for stages, kept in zip(stages_of, activations, strict=True)
        ]
    for rank, device in devices.items():
        gauge = gauge_of(device)
        if gauge is not None:
            held[rank] = gauge.peak()
    return tuple(held)


class RankRecord(NamedTuple):
    """When a rank performed its ops in one minibatch, as it was written down; most are never read.

    Attributes:
        ops: the rank's, in their order; in a stream, their microbatches count from ``base``.
        starts, ends: of each op, in seconds of the rank's clock.
        versions: which version of the weights each op read, if there are several.
        base: how many microbatches of the stream come before.
        clock_offset: by how many seconds the rank's clock is ahead of rank 0's.
        stamps: when each op happened, where that was on an accelerator: ``starts`` and ``ends`` are
            when the host asked for it.
        moved: what the rank moved, as ``Transfer`` has it: (kind, stage, number, start, end).
    """

    ops: Sequence[Op]
    starts: array[float]
    ends: array[float]
    versions: Sequence[int] = ()
    base: int = 0
    clock_offset: float = 0.0
    stamps: Stamps | None = None
    moved: Sequence[tuple[TransferKind, int, int, float, float]] = ()

    def row(self) -> Row:
        """The same as a timeline has it: numbered in the stream, in seconds of rank 0's clock."""
        ops, offset = self.ops, self.clock_offset
        if self.base:
            ops = [op._replace(microbatch=op.microbatch + self.base) for op in ops]
        starts, ends = happened(self.starts, self.ends, self.stamps)
        return Row(
            tuple(ops),
            array("d", [start - offset for start in starts]),
            array("d", [end - offset for end in ends]),
            tuple(self.versions) or None,
        )


class MinibatchOutcome(NamedTuple):
    """The result of one minibatch.

    Attributes:
        loss: weighted as on one device; ``None`` without targets.
        outputs: those of every microbatch in order; empty with targets.
        metrics: weighted like the loss.
        records: what each rank did; ``None`` where recording is off.
        norm: that of all gradients before clipping, where ranks agree on it.
        peaks: the most that every rank held, where memory is counted and told.
        held: the versions of its weights that every rank held, where there are several.
        begins: whether nothing was in flight before it.
    """

    loss: Tensor | None
    outputs: Sequence[Any]
    metrics: dict[str, Tensor]
    records: Sequence[RankRecord] | None
    norm: Tensor | None
    peaks: tuple[Peak, ...]
    held: tuple[HeldVersions, ...]
    begins: bool

    @classmethod
    def of_records(
        cls, records: Sequence[RankRecord], held: tuple[HeldVersions, ...], *, begins: bool
    ) -> MinibatchOutcome:
        """Only the records of the ranks."""
        return cls(None, (), {}, records, None, (), held, begins)

    @classmethod
    def of(
        cls,
        parts: Sequence[StepResult | RankReport],
        weights: Sequence[float],
        records: Sequence[RankRecord] | None,
        norm: Tensor | None,
        *,
        begins: bool = True,
    ) -> MinibatchOutcome:
        """Put together what the ranks have.

        Args:
            parts: what each rank has, in any order; no two have the same microbatch.
            weights: the factor on each microbatch's loss.
            records: what each rank did, if it was written down.
            norm: that of all gradients, if ranks agree on it.
            begins: whether nothing was in flight before.
        """
        losses: dict[int, Loss] = {}
        for part in parts:
            losses.update(part.losses)
        outputs = {k: value for part in parts for k, value in part.outputs.items()}
        together = _on_one_device([outputs[k] for k in sorted(outputs)])
        metrics: dict[str, dict[int, Tensor]] = defaultdict(dict)
        for part in parts:
            for name, values in part.metrics.items():
                metrics[name] |= values
        sums = {name: weighted_sum(values, weights) for name, values in metrics.items()}
        return cls(
            weighted_sum(losses, weights),
            together,
            {name: value for name, value in sums.items() if value is not None},
            records,
            norm,
            tuple(part.peak for part in parts if part.peak is not None),
            tuple(part.held for part in parts if part.held is not None),
            begins,
        )


def _on_one_device(values: list[Any]) -> list[Any]:
    """The values, on the device of the first tensor: copies of the last stage are on several."""
    if len(values) < 2:
        return values
    devices = {tensor.device: None for tensor in tree.tensors(values)}
    if len(devices) < 2:
        return values
    first = next(iter(devices))
    return [tree.replace(Tensor, lambda tensor: tensor.to(first), value) for value in values]


def as_numbers(losses: Iterable[Loss]) -> list[float] | None:
    """Losses as plain numbers, if all are in single precision and in main memory."""
    numbers = []
    for loss in losses:
        if isinstance(loss, Tensor):
            if loss.dtype is not torch.float32 or loss.ndim or not loss.is_cpu:
                return None
            numbers.append(loss.item())
        else:
            numbers.append(loss)
    return numbers


def weighted_sum(losses: Mapping[int, Loss], weights: Sequence[float]) -> Tensor | None:
    """The minibatch's loss, in single precision or better, summed in the microbatches' order.

    Args:
        losses: by microbatch.
        weights: the factor on each.
    """
    # The mean of no terms is NaN, and NaN · 0 as well.
    counted = [microbatch for microbatch in sorted(losses) if weights[microbatch]]
    if not counted:
        return None
    numbers = as_numbers([losses[microbatch] for microbatch in counted])
    if numbers is not None:
        # The same numbers, one after the other, without two of torch's calls per microbatch: what
        # an array of floats takes is rounded to single precision, and double precision is so much
        # finer that rounding twice is rounding once.
        single = array("f", [weights[microbatch] for microbatch in counted])
        pairs = zip(numbers, single, strict=True)
        first, *others = array("f", [number * weight for number, weight in pairs])
        total = array("f", [first])
        for term in others:
            total[0] += term
        return torch.full((), total[0], dtype=torch.float32, device="cpu")
    weighted = _on_one_device([_at_least_single(losses[k]) * weights[k] for k in counted])
    summed: Tensor = reduce(operator.add, weighted)
    return summed


def _at_least_single(loss: Loss) -> Tensor:
    """A loss, in single precision where it is in less: a sum in bfloat16 has 8 bits."""
    if not isinstance(loss, Tensor):
        return torch.full((), loss, dtype=torch.float32, device="cpu")
    is_less = loss.is_floating_point() and loss.dtype.itemsize < torch.float32.itemsize
    return loss.float() if is_less else loss


def timeline(
    steps: Sequence[Sequence[RankRecord]], name: str, activations: Activations = "own"
) -> Timeline:
    """The measured timeline of one minibatch, or of several that belong together.

    Args:
        steps: what every rank did, for each minibatch.
        activations: which ones backwards went through.
    """
    columns = [
        _joined([record.row() for record in records]) for records in zip(*steps, strict=True)
    ]
    zero = min((row.starts[0] for row in columns if row.ops), default=0.0)
    moved = (
        row._replace(
            starts=array("d", [start - zero for start in row.starts]),
            ends=array("d", [end - zero for end in row.ends]),
        )
        for row in columns
    )
    transfers = [
        transfer._replace(start=max(transfer.start - zero, 0.0), end=transfer.end - zero)
        for records in steps
        for transfer in (*_sums(records), *_stored(records))
        if transfer.end > zero
    ]
    return Timeline(tuple(moved), name, "measured", activations, transfers=tuple(sorted(transfers)))


def _sums(records: Sequence[RankRecord]) -> list[Transfer]:
    """The parts of gradients that ranks have exchanged: each from when the first of them sent it
    until the last one had the sum."""
    spans_of: dict[tuple[int, int, int], list[tuple[int, float, float]]] = defaultdict(list)
    for rank, record in enumerate(records):
        rounds: Counter[tuple[int, int]] = Counter()
        for kind, stage, part, start, end in record.moved:
            if kind != "sum":
                continue
            # In a stream, a stage may update several times.
            span = rank, start - record.clock_offset, end - record.clock_offset
            spans_of[stage, part, rounds[stage, part]].append(span)
            rounds[stage, part] += 1
    return [
        Transfer(
            tuple(rank for rank, _, _ in spans),
            "sum",
            stage,
            part,
            min(start for _, start, _ in spans),
            max(end for _, _, end in spans),
        )
        for (stage, part, _), spans in spans_of.items()
        if len(spans) > 1
    ]


def _stored(records: Sequence[RankRecord]) -> list[Transfer]:
    """Transfers between memory and tiers."""
    return [
        Transfer((rank,), kind, stage, number, start - offset, end - offset)
        for rank, record in enumerate(records)
        for offset in [record.clock_offset]
        for kind, stage, number, start, end in record.moved
        if kind != "sum"
    ]


def _joined(rows: Sequence[Row]) -> Row:
    if len(rows) == 1:
        return rows[0]
    known = all(row.versions is not None or not row.ops for row in rows)
    return Row(
        tuple(op for row in rows for op in row.ops),
        array("d", [start for row in rows for start in row.starts]),
        array("d", [end for row in rows for end in row.ends]),
        tuple(version for row in rows for version in row.versions or ()) if known else None,
    )
