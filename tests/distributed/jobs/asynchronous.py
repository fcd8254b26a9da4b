"""Ranks train asynchronous pipelines and compare with replays of their delays, of which each has
made some alone; then they report what differs."""

from __future__ import annotations

import copy
import json
import sys
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import penstock as pk
from penstock.base.errors import RunError
from penstock.trial.reference.delayed_replay import DelayedReplay
from penstock.trial.reference.single_device import SingleDevice
from tests.kit.sharing import spread
from tests.kit.streams import batches, cuts_of, layered_model, plan_for
from tests.numerics.test_asynchronous import OPTIMIZERS, POLICIES, SIZES

REPLICAS = {3: ("2-1", "1-2"), 4: ("2-1-1", "3-1", "2-2")}
# Sums in another order: of drifts and predictions, and of replicas.
TOLERANCE = 1e-12
LATER = (8, 8)
REPLICATED = ("2bw", "stash", "latest", "pipeoptim")
SOME = ("latest", "stash", "2bw", "pipemare")
"""Policies that differ most in what they keep and when they update."""


def pipeline_of(model, plan, optimizer, transport, deadline_seconds=300):
    return pk.Pipeline(
        model,
        plan,
        loss=nn.functional.mse_loss,
        optimizer=optimizer,
        transport=transport,
        seed=3,
        deadline_seconds=deadline_seconds,
    )


def weights_differ(pipeline, state):
    for key, value in pipeline.state_dict().items():
        if not torch.allclose(value, state[key], rtol=TOLERANCE, atol=TOLERANCE):
            yield key


def losses_differ(losses, expected):
    if not torch.allclose(torch.stack(losses), torch.stack(expected), rtol=TOLERANCE):
        yield "losses"


class Replayed(NamedTuple):
    """What a pipeline is to do.

    Attributes:
        losses: of the minibatches.
        state: of the model after them.
        delays: (stage, microbatch, delay) of each read.
        later_losses: of two more minibatches, each drained.
        later_state: after these.
    """

    plan: pk.Plan
    losses: list
    state: dict
    delays: list
    later_losses: list
    later_state: dict


def replay_of(policy, replicas) -> Replayed:
    """Without any pipeline."""
    stages = None if replicas else dist.get_world_size()
    plan = plan_for(POLICIES[policy], stages, microbatches=4, replicas=replicas)
    model = layered_model()
    replay = DelayedReplay(
        model,
        cuts_of(plan),
        plan.versions,
        4,
        nn.functional.mse_loss,
        OPTIMIZERS["adam"],
        replicas=plan.replicas,
        seed=3,
    )
    losses, state = replay.train(batches(SIZES)), copy.deepcopy(model.state_dict())
    delays = [(read.stage, read.microbatch, read.delay) for read in replay.reads]
    later = [loss for batch in batches(LATER, seed=6) for loss in replay.train([batch])]
    return Replayed(plan, losses, state, delays, later, model.state_dict())


def differences(replayed: Replayed, transport):
    plan = replayed.plan
    with pipeline_of(layered_model(), plan, OPTIMIZERS["adam"], transport) as pipeline:
        losses = list(pipeline.steps(batches(SIZES)))
        yield from losses_differ(losses, replayed.losses)
        yield from weights_differ(pipeline, replayed.state)
        known = plan.versions.name not in ("flush", "pipemare")  # whose first ones are synchronous
        delays = pipeline.timeline.delays if known else {}
        for stage, microbatch, delay in replayed.delays if known else ():
            if delays[stage][microbatch] != delay:
                yield f"delay of {stage}F{microbatch}"
        # Drained, it can evaluate, and go on.
        pipeline.evaluate(batches(SIZES)[0][0])
        later = [pipeline.step(*batch) for batch in batches(LATER, seed=6)]
        yield from losses_differ(later, replayed.later_losses)
        yield from weights_differ(pipeline, replayed.later_state)


def synchronous(replicas, transport):
    """Stages with replicas, flushed: what one device computes."""
    for schedule in ("1f1b", "gpipe"):
        plan = plan_for(
            POLICIES["flush"], None, microbatches=4, replicas=replicas, schedule=schedule
        )
        model, other = layered_model(), layered_model()
        optimizer = OPTIMIZERS["adam"]
        reference = SingleDevice(other, 4, nn.functional.mse_loss, optimizer, seed=3)
        with pipeline_of(model, plan, optimizer, transport) as pipeline:
            for one in batches(SIZES):
                yield from losses_differ([pipeline.step(*one)], [reference.step(*one)])
            yield from weights_differ(pipeline, other.state_dict())


def failing(transport):
    """A failure in the middle of a stream: nobody hangs, and everyone hears where it was."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    model = layered_model()
    plan = plan_for(POLICIES["stash"], num_ranks, microbatches=4, model=model)

    def poisoned():
        for index, (inputs, targets) in enumerate(batches(SIZES)):
            yield inputs, targets * (float("nan") if index == 3 else 1)

    pipeline = pipeline_of(model, plan, OPTIMIZERS["sgd"], transport)
    try:
        list(pipeline.steps(poisoned()))
        yield "nothing failed"
    except RunError as error:
        if "the loss is nan" not in str(error):
            yield f"rank {rank}: {error}"
    pipeline.close()


def uneven(transport):
    """A rank whose loader ends early, or fails: it says so itself, and nobody hangs."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for raises in (False, True):
        model = layered_model()
        plan = plan_for(POLICIES["stash"], num_ranks, microbatches=4, model=model)

        def loader(raises=raises):
            for index, one in enumerate(batches([8] * 6)):
                if rank == 1 and index == 3:
                    if raises:
                        raise ValueError("boom")
                    return
                yield one

        pipeline = pipeline_of(model, plan, OPTIMIZERS["sgd"], transport)
        try:
            list(pipeline.steps(loader()))
            yield "nothing failed"
        except ValueError as error:
            if not (raises and rank == 1 and "boom" in str(error)):
                yield f"rank {rank}: {error}"
        except RunError as error:
            told = not raises or (rank != 1 and "the loader of rank 1 has raised" in str(error))
            if not told or "zip" in str(error):
                yield f"rank {rank}: {error}"
        pipeline.close()


def cases_of(what, layouts):
    """(policy, layout of replicas or none): all there are, some of all kinds, or with replicas
    alone, of which "replicas" and "some" have different ones."""
    if what == "some":
        replicated = zip(("stash", "2bw"), layouts, strict=True)
        return [*((policy, None) for policy in SOME), *replicated]
    if what == "replicas":
        return [*zip(REPLICATED, (*layouts, *layouts), strict=True)]
    return [*((policy, None) for policy in POLICIES), *product(REPLICATED, layouts)]


def main(transport, what, folder):
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    layouts = REPLICAS.get(num_ranks, ())
    cases = cases_of(what, layouts)
    replays = spread([partial(replay_of, *case) for case in cases])
    found = [
        f"{case}: {difference}"
        for case, replayed in zip(cases, replays, strict=True)
        for difference in differences(replayed, transport)
    ]
    for replicas in layouts[:1] if what == "some" else layouts:
        found += [f"1f1b {replicas}: {one}" for one in synchronous(replicas, transport)]
    if what != "replicas":
        found += failing(transport)
        found += uneven(transport)
    report = {"differences": found}
    Path(folder, f"report-{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
