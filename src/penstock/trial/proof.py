"""``prove``: whether a plan trains a workload as it should, against an independent reference.

A synchronous plan must give what one device gives; an asynchronous one what its delays say,
replayed one microbatch at a time. Neither reference shares engine code.
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, takewhile
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.base.errors import InputError
from penstock.base.units import count_of
from penstock.core.schedule import Kind, Op, Schedule
from penstock.core.summation.staleness import StaleStream
from penstock.core.timing.timeline import Timeline
from penstock.core.versions import PipeMare, Sideways
from penstock.engine.device.accelerators import devices_of_ranks
from penstock.engine.model import microbatches, tree
from penstock.engine.model.optimizer_factory import Parameters
from penstock.engine.run.drive.joining import several_processes
from penstock.engine.run.materialising import place_buffers, place_parameters
from penstock.planning.plans import Plan
from penstock.planning.plans.explanation import steady_minibatch
from penstock.training.pipeline import Pipeline
from penstock.training.profiler.alone import Progress
from penstock.trial.curvature import layers_of_stages
from penstock.trial.reference.delayed_replay import DelayedReplay
from penstock.trial.reference.sideways_replay import SidewaysReplay
from penstock.trial.reference.single_device import CopiedStage, SingleDevice
from penstock.trial.reference.stale_replay import CopyOf, StaleReplay
from penstock.trial.verdict import Proof, ProofRow, Sides
from penstock.trial.workload import Batch, Workload, bring_back, intra_op_threads

_SEED = 0
_USUAL_STEPS = 5
_BEFORE = 2
"""Minibatches before a checkpoint: after the second, momentum is more than a gradient."""


def prove(
    workload: Workload,
    plan: Plan,
    num_steps: int | None = None,
    progress: Progress | None = None,
    *,
    float64: bool = False,
    resume: bool = False,
) -> Proof:
    """Train through a ``Pipeline`` in threads and through an independent reference, and compare.

    A synchronous plan is compared with ``SingleDevice``, which adds gradients of copies as their
    ranks do, in the order of the plan's ``summing``; one with stale updates with
    ``StaleReplay``, which takes from the pipeline's journal what each update was made of; an
    asynchronous one with ``DelayedReplay``, which has no pipeline and applies literally the
    versions that the policy states. There, recorded delays and versions held are compared with the
    policy's formulas, too. Both sides begin with equal weights and draw the same random numbers.

    Everything is expected to be equal to the bit, except where sums have another order: weights
    that several layers share, tensor ranks, slices of sequences, PipeMare's drift, and predicted
    weights. There, a tensor may be off by √ε of the way that
    training has moved it (ε of its dtype: 3e-4 in float32, 1.5e-8 in float64), or by 16 units in
    the last place.

    Args:
        plan: made for its model.
        num_steps: minibatches; by default 5, or more if the steady state needs more.
        progress: called with (minibatches trained on both sides together, minibatches in all).
        float64: train in float64 on both sides, where another order of sums hides nothing.
        resume: train two minibatches more, save behind them, and train the others in a new pipeline
            that loads them; the reference only drains there.

    Raises:
        InputError: the process is one of several; too few minibatches for the steady state, or too
            short ones; ``build_model`` gives other weights at each call; layers draw random numbers
            per slice, which one device cannot.
        ModelError: the plan is for another model.
        RunError: a step failed.
    """
    _check_provable(plan, resume)
    sides = Sides.of(workload, plan, float64)
    batches = _batches(workload, plan, num_steps, float64, _BEFORE if resume else 0)
    before, batches = batches[: _BEFORE * resume], batches[_BEFORE * resume :]
    window = _steady_window(plan, batches)
    with intra_op_threads(plan.num_threads):
        ours, timeline, held, journals = _pipelined(sides, workload, before, batches, progress)
        theirs, delays = _referred(sides, workload, before, batches, journals)
    if progress is not None:
        progress(2 * len(ours), 2 * len(ours))
    rows = tuple(_row(sides, stage, timeline, held, window) for stage in range(len(sides.names)))
    return Proof(
        plan=plan,
        reference=_reference(plan, journals),
        num_before=len(before),
        expected=sides.expected,
        losses=tuple(zip(map(float, ours), map(float, theirs), strict=True)),
        loss_tolerance=sqrt(torch.finfo(ours[0].dtype).eps) if sides.rounding else 0.0,
        rows=rows,
        misread=(*_misread(plan, timeline, delays), *_too_late(journals, plan.summing.stale)),
    )


def _check_provable(plan: Plan, resume: bool) -> None:
    if several_processes():
        raise InputError(
            "a proof runs all ranks in threads of one process, but this is one of "
            f"{os.environ.get('WORLD_SIZE', 'several')} processes (WORLD_SIZE); start it without "
            "torchrun"
        )
    if isinstance(plan.versions, Sideways) and (resume or plan.num_microbatches > 1):
        raise InputError(
            "a stream of frames is proven in one go, with frames of one microbatch; plan with "
            "num_microbatches=1, and leave --resume out"
        )


def _misread(
    plan: Plan, timeline: Timeline, delays: Mapping[tuple[int, int], int]
) -> Iterator[tuple[int, int]]:
    """(stage, microbatch) whose recorded delay is not the one that the reference applied."""
    newest = plan.versions.activations == "newest"
    recorded = timeline.delays if plan.versions.asynchronous else {}
    for stage, delays_of_stage in recorded.items():
        for k, delay in delays_of_stage.items():
            # What a stream's end drops has no delay, whatever the pipeline has noted.
            if delays.get((stage, k), delay if newest else None) != delay:
                yield stage, k


def _reference(plan: Plan, journals: Sequence[Journal]) -> str:
    if plan.versions.asynchronous:
        return "the sequential replay of its delays"
    if plan.summing.stale:
        most = count_of(latest(journals), "update")
        return f"the replay of its journal, in which gradients were up to {most} late"
    return "one device"


def steps_needed(plan: Plan) -> int:
    """How many minibatches a proof of a plan needs at least: one in the steady state."""
    policy = plan.versions
    synchronous = policy.t3 if isinstance(policy, PipeMare) else 0
    return synchronous + steady_minibatch(plan) + 1


def _batches(
    workload: Workload, plan: Plan, num_steps: int | None, float64: bool, num_before: int
) -> list[Batch]:
    least = steps_needed(plan)
    # One minibatch more than needed, so that the steady state is seen to last.
    count = max(_USUAL_STEPS, least + 1) if num_steps is None else num_steps
    if count < least:
        raise InputError(
            f"{count} minibatches do not reach the steady state, in which delays are compared; "
            f"take {least} or more"
        )
    count += num_before
    batches = list(islice(workload.batches(), count))
    if len(batches) < count:
        raise InputError(
            f"the workload {workload.name} yields only {len(batches)} minibatches, but {count} are "
            "to be trained"
        )
    if any(isinstance(part, microbatches.Microbatches) for batch in batches for part in batch):
        raise InputError("a proof cuts minibatches itself; give whole ones, not Microbatches")
    if not float64:
        return batches
    return [tuple(tree.replace(Tensor, _doubled, part) for part in batch) for batch in batches]


def _doubled(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _steady_window(plan: Plan, batches: Sequence[Batch]) -> range:
    """The microbatches of the stream whose delays are those of the steady state."""
    policy, size = plan.versions, plan.num_microbatches
    synchronous = policy.t3 if isinstance(policy, PipeMare) else 0
    rows = [microbatches.num_rows(inputs, "inputs") for inputs, _ in batches[synchronous:]]
    whole = sum(1 for _ in takewhile(lambda count: count >= size, rows))
    first = steady_minibatch(plan)
    # Behind a short minibatch, what updates once per minibatch may drain, or hold more versions.
    least = len(rows) - 1 if policy.updates == "minibatch" else first + 1
    if policy.asynchronous and whole < max(least, first + 1):
        raise InputError(
            f"minibatch {synchronous + whole} has {rows[whole]} rows, fewer than the plan's {size} "
            "microbatches; the formulas are for whole minibatches, so give larger ones"
        )
    return range(first * size, whole * size)


class _Trained(NamedTuple):
    """The results of the pipeline.

    Attributes:
        losses: one per minibatch.
        timeline: the last step's, or the stream's.
        held: how many versions each rank held; empty for a synchronous plan.
        journals: of each stream, by stage, what a parameter server's stale updates were made of.
    """

    losses: list[Tensor]
    timeline: Timeline
    held: tuple[int, ...]
    journals: list[Journal]


def _pipeline(sides: Sides, workload: Workload, model: nn.Module) -> Pipeline:
    plan = sides.plan
    if plan.summing.reducer == "fully-sharded":  # whose processes add as these do
        plan = plan.with_reducer("owners")
    return Pipeline(
        model,
        plan,
        loss=workload.loss,
        optimizer=workload.optimizer,
        transport="threads",
        seed=_SEED,
    )


def _pipelined(
    sides: Sides,
    workload: Workload,
    before: Sequence[Batch],
    batches: Sequence[Batch],
    progress: Progress | None,
) -> _Trained:
    losses: list[Tensor] = []
    journals: list[Journal] = []

    def train(pipeline: Pipeline, own: Sequence[Batch]) -> None:
        for loss in pipeline.steps(own):
            assert loss is not None  # it tells its results
            losses.append(loss)
            if progress is not None:
                progress(len(losses), 2 * (len(before) + len(batches)))
        journals.append(pipeline.stale_streams)

    with tempfile.TemporaryDirectory() as folder:
        if before:
            # Nothing but the files goes from here to the pipeline that resumes.
            with _pipeline(sides, workload, copy.deepcopy(sides.model)) as pipeline:
                train(pipeline, before)
                pipeline.save(folder)
        with _pipeline(sides, workload, sides.model) as pipeline:
            if before:
                pipeline.load(folder)
            train(pipeline, batches)
            asynchronous = sides.plan.versions.asynchronous
            held = tuple(held.versions for held in pipeline.held_versions) if asynchronous else ()
            bring_back(pipeline, sides.model)
            return _Trained(losses, pipeline.timeline, held, journals)


def _referred(
    sides: Sides,
    workload: Workload,
    before: Sequence[Batch],
    batches: Sequence[Batch],
    journals: Sequence[Journal],
) -> tuple[list[Tensor], dict[tuple[int, int], int]]:
    """The losses of the reference and, by stage and microbatch, the delays that it applied.

    It computes on the device of the plan's first rank: another kind of device has other bits.
    """
    plan = sides.plan
    device = devices_of_ranks(None, plan.on_accelerator, range(plan.num_ranks))[0]
    twin = sides.twin
    # ``Module.to`` breaks ties on kinds of device that torch does not know by itself.
    place_parameters(twin, device)
    place_buffers(twin.modules(), device)
    before, batches = tree.replace(
        Tensor, lambda tensor: tensor.to(device), (list(before), list(batches))
    )
    if plan.summing.stale:
        streams = [before, batches] if before else [batches]
        return replayed(twin, plan, workload, streams, journals, _SEED), {}
    if isinstance(plan.versions, Sideways):
        return _borrowed(twin, plan, workload, [*before, *batches])
    if plan.versions.asynchronous:
        ranks_of = plan.placement.ranks_of
        replay = DelayedReplay(
            twin,
            [len(stage.layers) for stage in plan.stages],
            plan.versions,
            plan.num_microbatches,
            workload.loss,
            workload.optimizer,
            replicas=plan.replicas,
            trees=[plan.summing.tree(ranks_of(stage)) for stage in range(len(plan.stages))],
            seed=_SEED,
        )
        losses = (replay.train(before) if before else []) + replay.train(batches)
        return losses, {(read.stage, read.microbatch): read.delay for read in replay.reads}
    # As a pipeline's, the list knows the names.
    parameters = Parameters(list(twin.named_parameters()))
    alone = SingleDevice(
        twin,
        plan.num_microbatches,
        workload.loss,
        lambda _: workload.optimizer(parameters),
        seed=_SEED,
        copied=_copied(plan, twin),
    )
    return [alone.step(*batch) for batch in (*before, *batches)], {}


def _copied(plan: Plan, twin: nn.Module) -> list[CopiedStage]:
    """The stages of which several ranks have a copy, with the order in which these add."""
    copy_of, stages = copies_of(plan), []
    for stage, layers in enumerate(layers_of_stages(twin, plan)):
        ranks = plan.placement.ranks_of(stage)
        if len(ranks) > 1:
            parameters = dict.fromkeys(
                weight for layer in layers for weight in layer.module.parameters()
            )

            def rank_of(microbatch: int, count: int, stage: int = stage) -> int:
                ranks = plan.placement.ranks_of(stage)
                return ranks[copy_of(stage, microbatch, count)]

            stages.append(CopiedStage(tuple(parameters), plan.summing.tree(ranks), rank_of))
    return stages


def _borrowed(
    twin: nn.Module, plan: Plan, workload: Workload, batches: Sequence[Batch]
) -> tuple[list[Tensor], dict[tuple[int, int], int]]:
    """As ``_referred``, where gradients go through the newest activations."""
    assert isinstance(plan.versions, Sideways)
    replay = SidewaysReplay(
        twin,
        [len(stage.layers) for stage in plan.stages],
        workload.loss,
        workload.optimizer,
        rates=plan.versions.rates,
        seed=_SEED,
    )
    losses = [seen.loss for seen in replay.train(batches) if seen.loss is not None]
    # While the stream begins, fewer updates are between two frames than frames.
    delays = {(back.stage, back.gradient): min(back.gradient, back.age) for back in replay.borrowed}
    return losses, delays


def _row(
    sides: Sides, stage: int, timeline: Timeline, held: Sequence[int], window: range
) -> ProofRow:
    policy, place = sides.plan.versions, sides.plan.place(stage)
    recorded = None
    if policy.asynchronous:
        delays = [delay for k, delay in timeline.delays[stage].items() if k in window]
        recorded = sum(delays) / len(delays)
    ranks = sides.plan.placement.ranks_of(stage) if held and sides.has_moved(stage) else ()
    return ProofRow(
        layers=sides.plan.stages[stage].layers,
        delay=policy.delay(place),
        recorded_delay=recorded,
        versions=policy.versions_held(place),
        held=tuple(held[rank] for rank in ranks),
        differences=sides.differences(stage),
    )


Journal = Mapping[int, StaleStream]
"""Of one stream, by stage, what the updates of a parameter server were made of."""


def copies_of(plan: Plan) -> CopyOf:
    """Which copy of a stage runs a microbatch, as the plan's schedule says."""
    schedules: dict[int, Schedule] = {}

    def copy_of(stage: int, microbatch: int, count: int) -> int:
        count = max(count, plan.num_microbatches)  # what a minibatch lacks counts for nothing
        if count not in schedules:
            schedules[count] = plan.build_schedule(count)
        rank = schedules[count].where[Op(stage, Kind.FORWARD, microbatch)]
        return plan.placement.ranks_of(stage).index(rank)

    return copy_of


def replayed(
    twin: nn.Module,
    plan: Plan,
    workload: Workload,
    streams: Sequence[Sequence[Batch]],
    journals: Sequence[Journal],
    seed: int,
) -> list[Tensor]:
    """The losses of all minibatches; the twin has the weights afterwards.

    Args:
        streams: the minibatches of each stream.
        journals: of each stream.
        seed: of random layers.
    """
    replay = StaleReplay(
        twin,
        [len(stage.layers) for stage in plan.stages],
        plan.num_microbatches,
        workload.loss,
        workload.optimizer,
        copy_of=copies_of(plan),
        seed=seed,
    )
    pairs = zip(streams, journals, strict=True)
    return [loss for batches, journal in pairs for loss in replay.train(batches, journal)]


def latest(journals: Sequence[Journal]) -> int:
    """By how many updates the latest gradient was late."""
    delays = (stream.delays for journal in journals for stream in journal.values())
    return max((delay for own in delays for delay in own.values()), default=0)


def _too_late(journals: Sequence[Journal], most_stale: int) -> list[tuple[int, int]]:
    """(stage, minibatch) of gradients that were later than they may be."""
    return [
        (stage, contribution.minibatch)
        for journal in journals
        for stage, stream in journal.items()
        for contribution, delay in stream.delays.items()
        if delay > most_stale
    ]
