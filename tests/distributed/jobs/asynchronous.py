"""Every rank trains asynchronous pipelines and, beside each, replays its delays alone; then it
reports what differs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import penstock as pk
from penstock.errors import RunError
from penstock.trial.reference.delayed_replay import DelayedReplay
from penstock.trial.reference.single_device import SingleDevice
from tests.kit.streams import batches, cuts_of, layered_model, plan_for
from tests.numerics.test_asynchronous import OPTIMIZERS, POLICIES, SIZES

REPLICAS = {3: ("2-1", "1-2"), 4: ("2-1-1", "3-1", "2-2")}
# Sums in another order: of drifts and predictions, and of replicas.
TOLERANCE = 1e-12


def pipeline_of(model, plan, optimizer, transport):
    return pk.Pipeline(
        model,
        plan,
        loss=nn.functional.mse_loss,
        optimizer=optimizer,
        transport=transport,
        seed=3,
        deadline_seconds=30,
    )


def weights_differ(pipeline, model):
    state = model.state_dict()
    for key, value in pipeline.state_dict().items():
        if not torch.allclose(value, state[key], rtol=TOLERANCE, atol=TOLERANCE):
            yield key


def losses_differ(losses, expected):
    if not torch.allclose(torch.stack(losses), torch.stack(expected), rtol=TOLERANCE):
        yield "losses"


def replayed(policy, replicas, transport):
    num_ranks = dist.get_world_size()
    stages = None if replicas else num_ranks
    plan = plan_for(POLICIES[policy], stages, microbatches=4, replicas=replicas)
    model, other = layered_model(), layered_model()
    optimizer = OPTIMIZERS["adam"]
    replay = DelayedReplay(
        other,
        cuts_of(plan),
        plan.versions,
        4,
        nn.functional.mse_loss,
        optimizer,
        replicas=plan.replicas,
        seed=3,
    )
    expected = replay.train(batches(SIZES))
    with pipeline_of(model, plan, optimizer, transport) as pipeline:
        losses = list(pipeline.steps(batches(SIZES)))
        yield from losses_differ(losses, expected)
        yield from weights_differ(pipeline, other)
        known = plan.versions.name not in ("flush", "pipemare")  # whose first ones are synchronous
        delays = pipeline.timeline.delays if known else {}
        for one in replay.reads if known else ():
            if delays[one.stage][one.microbatch] != one.delay:
                yield f"delay of {one.stage}F{one.microbatch}"
        # Drained, it can evaluate, and go on.
        pipeline.evaluate(batches(SIZES)[0][0])
        again = [pipeline.step(*one) for one in batches((8, 8), seed=6)]
        for loss, one in zip(again, batches((8, 8), seed=6), strict=True):
            yield from losses_differ([loss], replay.train([one]))
        yield from weights_differ(pipeline, other)


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
            yield from weights_differ(pipeline, other)


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
            if (raises and rank == 1) or "zip" in str(error):
                yield f"rank {rank}: {error}"
        pipeline.close()


def main(transport, folder):
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    found = []
    for policy in POLICIES:
        found += [f"{policy}: {one}" for one in replayed(policy, None, transport)]
    for replicas in REPLICAS.get(num_ranks, ()):
        for policy in ("stash", "latest", "2bw", "pipeoptim"):
            found += [f"{policy} {replicas}: {o}" for o in replayed(policy, replicas, transport)]
        found += [f"1f1b {replicas}: {one}" for one in synchronous(replicas, transport)]
    found += failing(transport)
    found += uneven(transport)
    report = {"differences": found}
    Path(folder, f"report-{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
