"""From the training of each method to the figures of its row, the bytes that its devices send among
them; and whether a method computes what it should.
"""

from __future__ import annotations

import datetime
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from itertools import islice, pairwise
from math import isfinite, sqrt

import torch
from msgspec.structs import replace

from penstock.base.units import count_of, format_bytes_per_second
from penstock.core.cluster import Link
from penstock.core.cluster.local import usable_cores
from penstock.core.graph import LayerGraph
from penstock.core.timing.timeline import Timeline
from penstock.drawing.contest import ONE_DEVICE, ContestRecord, Entry
from penstock.planning.partition.tensor import split_layers
from penstock.planning.plans import Plan
from penstock.planning.plans.spilling import traffic
from penstock.trial.contest.entrants import Entrant
from penstock.trial.contest.methods import WHOLE, ContestSetting
from penstock.trial.workload import StepPace, on_one_device

_TOLERANCE = sqrt(torch.finfo(torch.float32).eps)
"""By how much losses may differ where sums have another order, relative to the largest."""


def references(entrants: Sequence[Entrant], setting: ContestSetting) -> dict[int, list[float]]:
    """The losses of one device, by the number of microbatches that it cuts minibatches into.

    What cuts them otherwise than one device in the contest is compared with a loop of its own that
    nobody times.
    """
    losses: dict[int, list[float]] = {}
    for entrant in entrants:
        if entrant.plan is None or entrant.trainer is None or entrant.plan.versions.asynchronous:
            continue
        count = entrant.plan.num_microbatches
        if entrant.method.key in (ONE_DEVICE, WHOLE):
            losses[count] = entrant.trainer.losses
        elif count not in losses:
            alone = on_one_device(setting.workload, count, num_threads=1)
            for batch in islice(setting.workload.batches(), len(entrant.trainer.losses)):
                alone.step(batch)
            losses[count] = alone.losses
    return losses


def check_sameness(entrants: Sequence[Entrant], references: Mapping[int, Sequence[float]]) -> None:
    """Note by how much losses of synchronous methods differ from one device's, and stop those
    where that is more than rounding."""
    for entrant in entrants:
        plan, trainer = entrant.plan, entrant.trainer
        if plan is None or trainer is None or plan.versions.asynchronous:
            continue
        theirs = references[plan.num_microbatches]
        apart = [abs(ours - other) for ours, other in zip(trainer.losses, theirs, strict=True)]
        scale = max(map(abs, theirs))
        difference = max(apart) / scale if scale else max(apart)
        entrant.difference = difference if isfinite(difference) else None
        if not difference <= _TOLERANCE:
            step = next(k for k, gap in enumerate(apart) if not gap <= _TOLERANCE * scale)
            entrant.stop(
                "it does not compute what one device computes: at minibatch "
                f"{step} its loss is {trainer.losses[step]!r} instead of {theirs[step]!r}"
            )


def judged(
    entrants: Sequence[Entrant], setting: ContestSetting, target: float | None
) -> ContestRecord:
    """The record of a contest whose methods have trained."""
    entries = tuple(_entry(entrant, setting) for entrant in entrants)
    if target is None:
        target = _target(entries[0])
    steps = max((entry.losses[-1].step for entry in entries if entry.losses), default=0)
    has_data = setting.workload.held_out is not None
    return ContestRecord(
        title=setting.workload.name,
        notes=(*_notes(setting), *_unsplit(entrants)),
        num_devices=setting.num_devices,
        num_microbatches=setting.num_microbatches,
        num_steps=steps,
        loss_name="held-out loss" if has_data else "training loss",
        target=target,
        entries=entries,
    )


def _target(one_device: Entry) -> float | None:
    """The loss of one device at the end of the turn in the middle; none where it has not learned by
    then."""
    losses = [point.loss for point in one_device.losses]
    if len(losses) < 2:
        return None
    first, middle = losses[0], losses[len(losses) // 2]
    return middle if first is not None and middle is not None and middle < first else None


def _notes(setting: ContestSetting) -> tuple[str, ...]:
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    cores = count_of(usable_cores(), "core")
    emulated = (
        "Times are those of emulated devices: every rank is a process whose compute is a wait as "
        "long as the profile says; losses come from the same plans in threads.",
    )
    rate = setting.cluster.link.bytes_per_second
    network = (
        f"Messages and sums wait for emulated links of {format_bytes_per_second(rate)} in each "
        "direction between any two devices."
        if rate
        else "Ranks share this host's memory, so nothing waits for a network."
    )
    return (
        f"{platform.system()} {platform.machine()}, {cores}, torch {torch.__version__}, "
        f"{datetime.datetime.now():%Y-%m-%d %H:%M}, load {load:.1f} at the end.",
        *(emulated if setting.stage == "emulated" else ()),
        network,
        *((f"Data: {setting.workload.notes}.",) if setting.workload.notes else ()),
        *(f"Profile: {warning}." for warning in setting.graph.warnings),
    )


def _unsplit(entrants: Sequence[Entrant]) -> tuple[str, ...]:
    return tuple(
        f"{entrant.method.title.capitalize()}: on these links no layer is worth splitting, so each "
        f"of its {entrant.plan.num_tensor_ranks} tensor ranks computes all, as one device does."
        for entrant in entrants
        if entrant.plan is not None and splits_nothing(entrant.plan)
    )


def _entry(entrant: Entrant, setting: ContestSetting) -> Entry:
    plan, trainer, method = entrant.plan, entrant.trainer, entrant.method
    named = Entry(
        method=method.key,
        title=method.title,
        page=method.page,
        where=entrant.where,
        reason=entrant.reason,
        synchronous=plan is None or not plan.versions.asynchronous,
        difference=entrant.difference,
    )
    if plan is None or trainer is None:
        return named
    seconds, bubble = _predicted(plan, setting.turn)
    timelines = trainer.timelines
    measured = entrant.paced or _middle(timelines)
    if entrant.paced_seconds is not None:
        seconds, bubble = plan.step_seconds, plan.prediction.bubble
    graph = setting.graph if plan.num_microbatches > 1 else setting.whole
    # On emulated devices compute is a wait, which others do not make longer.
    paced = entrant.paced_seconds
    pace = StepPace.of(trainer.seconds, trainer.others) if paced is None else StepPace(paced)
    return replace(
        named,
        num_devices=plan.num_seats,
        predicted_seconds=seconds,
        step_seconds=pace.seconds,
        predicted_bytes=max(plan.rank_bytes),
        memory_bytes=_memory(plan, entrant.activation_bytes),
        moved_bytes=moved_bytes(plan, graph, method.num_servers, setting.cluster.link),
        predicted_bubble=bubble,
        bubble=None if measured is None else measured.bubble,
        delay=plan.prediction.delay,
        recorded_delay=_recorded_delay(plan, timelines) if plan.versions.asynchronous else 0.0,
        losses=tuple(entrant.points),
        others=pace.others,
    )


def _predicted(plan: Plan, turn: int) -> tuple[float, float]:
    """(seconds of a minibatch, bubble); of a stream, with its beginning and its end, since it
    drains after every turn."""
    if not plan.versions.asynchronous:
        return plan.step_seconds, plan.prediction.bubble
    timeline = plan.simulate(turn)
    return timeline.makespan / turn, timeline.bubble


def _middle(timelines: Sequence[Timeline]) -> Timeline | None:
    """The one that took the median time."""
    ordered = sorted(timelines, key=lambda timeline: timeline.makespan)
    return ordered[len(ordered) // 2] if ordered else None


def _recorded_delay(plan: Plan, timelines: Sequence[Timeline]) -> float | None:
    """The mean age of gradients at the stage where it is most, in the longest stream, without the
    minibatches that fill the pipeline."""
    if not timelines:
        return None
    longest = max(timelines, key=lambda timeline: timeline.schedule.num_microbatches)
    first = plan.num_microbatches * max(1, plan.num_ranks - 1)
    ages = [
        [age for k, age in by_microbatch.items() if k >= first]
        for by_microbatch in longest.delays.values()
    ]
    return max((statistics.fmean(stage) for stage in ages if stage), default=None)


def _memory(plan: Plan, activation_bytes: Sequence[int]) -> int | None:
    """Bytes of the neediest device: what was counted of activations, and the rest as planned."""
    if not activation_bytes:
        return None
    each = len(activation_bytes) // plan.num_ranks
    return max(
        sum(plan.stages[stage].state_bytes for stage in stages)
        + max(activation_bytes[rank * each : (rank + 1) * each])
        for rank, stages in enumerate(plan.placement.stages_of)
    )


def moved_bytes(
    plan: Plan, graph: LayerGraph, num_servers: int = 0, link: Link | None = None
) -> int:
    """Bytes that all devices of a plan together send for a minibatch, or that go to and from its
    tier.

    Between stages, outputs and their gradients; among copies of a stage, gradients (and weights,
    where another device updates them); among tensor ranks, parts of values.

    Args:
        plan: the plan.
        graph: the profile that it was made of.
        num_servers: machines besides its devices that sum gradients.
        link: between any two devices, on which depends what tensor ranks split; by default so
            fast that it does not count.
    """
    if plan.spill is not None:
        return sum(traffic(plan.stages, plan.num_microbatches))
    return _between_stages(plan) + _of_gradients(plan, num_servers) + _in_groups(plan, graph, link)


def splits_nothing(plan: Plan) -> bool:
    """Whether the devices of its groups compute every layer whole, each on its own, since on their
    links that is fastest."""
    return plan.num_tensor_ranks > 1 and all(
        split == "whole" for stage in plan.stages for split in stage.splits.values()
    )


def _between_stages(plan: Plan) -> int:
    crossing = sum(
        before.transfer_bytes * before.tensor_ranks
        for before, after in pairwise(plan.stages)
        if before.rank != after.rank
    )
    return 2 * plan.num_microbatches * crossing


def _of_gradients(plan: Plan, num_servers: int) -> int:
    total = 0.0
    for stage, copies, updates in zip(
        plan.stages, plan.replicas, plan.updates_per_minibatch, strict=True
    ):
        if copies > 1:
            held = stage.parameter_bytes * stage.tensor_ranks
            total += updates * _of_sums(plan, copies, held, num_servers)
    return round(total)


def _of_sums(plan: Plan, copies: int, num_bytes: int, num_servers: int) -> float:
    """Sent for one sum of ``num_bytes`` of gradients by all copies and servers."""
    if plan.summing.reducer == "parameter-server":
        return 2.0 * copies * num_bytes
    if plan.summing.reducer == "servers" and num_servers:
        # Each copy sums g bytes, each server c; what one sums comes from and goes to all others.
        spread = copies**2 + num_servers * copies - 2 * num_servers
        own = max(0.0, (copies - num_servers) * num_bytes / spread)
        theirs = (num_bytes - copies * own) / num_servers
        return 2 * copies * (copies - 1) * own + 2 * num_servers * copies * theirs
    return 2.0 * (copies - 1) * num_bytes


def _in_groups(plan: Plan, graph: LayerGraph, link: Link | None) -> int:
    if plan.num_tensor_ranks == 1 or splits_nothing(plan):
        return 0
    split = split_layers(
        graph, plan.num_tensor_ranks, link or Link(), num_microbatches=plan.num_microbatches
    )
    return split.moved_bytes
