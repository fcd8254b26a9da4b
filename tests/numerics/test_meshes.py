"""Meshes of pipe × data × tensor train what one device trains."""

from __future__ import annotations

import threading
from collections import Counter
from functools import lru_cache, partial

import pytest
import torch
from msgspec.structs import replace

import penstock as pk
from penstock.core.schedule import families
from penstock.engine.model.spine import run_spine
from penstock.trial.reference.delayed_replay import DelayedReplay
from penstock.trial.reference.single_device import SingleDevice
from tests.kit.groups import SPLITS, make_net, net_batch, net_loss
from tests.kit.helpers import make_plan
from tests.kit.one_device import OneDevice, assert_same, assert_same_values, same
from tests.kit.training import DEADLINE_SECONDS
from tests.kit.waiting import until

TOLERANCE = 1e-12
NUM_STEPS = 3
MICROBATCHES = 4
CLIP = 0.6


def momentum(parameters, clip_norm=None):
    # Not Adam: the bias of keys has a gradient of nothing but rounding, which it makes large.
    parameters = list(parameters)
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    if clip_norm:

        def clip(*_):
            torch.nn.utils.clip_grad_norm_(parameters, clip_norm)

        optimizer.register_step_pre_hook(clip)
    return optimizer


def batches():
    return [net_batch(10, seed) for seed in range(NUM_STEPS)]


@lru_cache
def on_one_device():
    model = make_net()
    one = SingleDevice(model, MICROBATCHES, net_loss, partial(momentum, clip_norm=CLIP), seed=3)
    return torch.stack([one.step(*batch) for batch in batches()]), model


def mesh(model, schedule, pipe, data, tensor, recompute="none", splits=SPLITS):
    plan = make_plan(model, pipe, MICROBATCHES, schedule, recompute=recompute)
    if data > 1:
        built = families.build(
            schedule,
            num_ranks=pipe * data,
            num_microbatches=MICROBATCHES,
            replicas=(data,) * pipe,
        )
        stages = [
            replace(stage, rank=built.ranks_of(index)[0]) for index, stage in enumerate(plan.stages)
        ]
        plan = replace(plan, options={"replicas": [data] * pipe}, stages=tuple(stages))
    return plan.with_tensor_split(tensor, splits) if tensor > 1 else plan


def train(model, plan, **options):
    given = {"loss": net_loss, "optimizer": momentum, "clip_norm": CLIP, "seed": 3}
    with pk.Pipeline(
        model, plan, deadline_seconds=DEADLINE_SECONDS, **{**given, **options}
    ) as pipeline:
        first, *rest = batches()
        losses = [pipeline.step(*first), *pipeline.steps(rest)]
        assert pipeline.timeline.num_ranks == plan.num_ranks
    return torch.stack(losses)


MESHES = [
    (schedule, pipe, data, tensor)
    for schedule in ("1f1b", "zb-h1", "interleaved-1f1b")
    for pipe in (1, 2)
    for data in (1, 2)
    for tensor in (1, 2)
    if (data == 1 or schedule == "1f1b") and pipe * data * tensor > 1
    if pipe > 1 or schedule == "1f1b"
]


@pytest.mark.parametrize(("schedule", "pipe", "data", "tensor"), MESHES)
def test_a_mesh_trains_as_one_device(schedule, pipe, data, tensor):
    model = make_net()
    losses = train(model, mesh(model, schedule, pipe, data, tensor))
    expected, theirs = on_one_device()
    assert same(losses, expected, TOLERANCE)
    assert_same(model, theirs, TOLERANCE)


@pytest.mark.parametrize("recompute", ["stage", "layers"])
def test_what_runs_again_exchanges_again(recompute):
    model = make_net()
    losses = train(model, mesh(model, "zb-h1", 2, 1, 2, recompute))
    expected, theirs = on_one_device()
    assert same(losses, expected, TOLERANCE)
    assert_same(model, theirs, TOLERANCE)


UNEVEN_SPLITS = {
    **{key: how for key, how in SPLITS.items() if "blocks" not in key},
    "blocks.0": "data",
    "blocks.*.mlp.0": "column",
    "blocks.*.mlp.2": "features",
    "blocks.*.mlp.3": "row",
}
"""Of a ``Net`` over three members, among whom two heads cannot be divided."""


def test_three_tensor_ranks_have_uneven_parts():
    model = make_net()
    train(model, mesh(model, "1f1b", 2, 1, 3, splits=UNEVEN_SPLITS))
    assert_same(model, on_one_device()[1], TOLERANCE)


@pytest.mark.parametrize("data", [1, 2])
def test_two_versions_train_as_their_replay(data):
    ours, theirs = make_net(tied=False), make_net(tied=False)
    plan = mesh(ours, "pipedream-2bw", 2, data, 2)
    losses = train(ours, plan, clip_norm=None, clip_stage_norm=CLIP)
    replay = DelayedReplay(
        theirs,
        [len(stage.layers) for stage in plan.stages],
        plan.versions,
        plan.num_microbatches,
        net_loss,
        momentum,
        replicas=plan.replicas,
        clip_stage_norm=CLIP,
        seed=3,
    )
    expected = [*replay.train(batches()[:1]), *replay.train(batches()[1:])]
    assert same(losses, torch.stack(expected), TOLERANCE)
    assert_same(ours, theirs, TOLERANCE)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, 1, 2), (1, 1, 1)),
        ((1, 1, 1), (2, 1, 2)),
        ((1, 1, 2), (2, 2, 3)),
        ((2, 2, 2), (1, 1, 2)),
    ],
)
def test_a_checkpoint_goes_on_in_any_mesh(before, after, tmp_path):
    splits = {key: how for key, how in SPLITS.items() if how != "column/3" and "project" not in key}
    splits["blocks.1"] = "data"
    ours = make_net()
    first, *rest = batches()
    for sizes, own in ((before, [first]), (after, rest)):
        model = ours if sizes is after else make_net()
        plan = mesh(model, "1f1b", *sizes, splits=SPLITS if 3 not in after else splits)
        with pk.Pipeline(
            model,
            plan,
            loss=net_loss,
            optimizer=momentum,
            clip_norm=CLIP,
            seed=3 if sizes is before else 4,  # that of the run goes on
            deadline_seconds=DEADLINE_SECONDS,
        ) as pipeline:
            if sizes is after:
                assert pipeline.load(tmp_path) == 1
            for batch in own:
                pipeline.step(*batch)
            pipeline.save(tmp_path)
    assert_same(ours, on_one_device()[1], TOLERANCE)


def without_dropout():
    model = make_net()
    model.forward = lambda tokens: run_spine(model.spine(), tokens)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def test_a_loss_scale_follows_as_on_one_device():
    ours, theirs = without_dropout(), without_dropout()
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**9, growth_interval=2) for _ in range(2)]
    one = OneDevice(
        theirs, MICROBATCHES, net_loss, momentum, clip_norm=CLIP, grad_scaler=scalers[0]
    )
    expected = [one.step(*batch) for batch in batches()]
    losses = train(ours, mesh(ours, "1f1b", 2, 1, 2), grad_scaler=scalers[1])
    assert same(losses, torch.stack(expected), TOLERANCE)
    assert_same(ours, theirs, TOLERANCE)
    assert scalers[1].get_scale() == scalers[0].get_scale() == 2.0**10


def test_autocast_reaches_every_member():
    def forwards(model):
        seen = []
        model.up.mix.register_forward_hook(lambda *given: seen.append(given[2].dtype))
        with torch.autocast("cpu", torch.bfloat16):
            train(model, mesh(model, "1f1b", 2, 1, 2))
        return seen

    seen = forwards(make_net().float())
    assert set(seen) == {torch.bfloat16}
    assert len(seen) == 2 * NUM_STEPS * MICROBATCHES


@pytest.mark.parametrize("where", ["blocks.0.mlp.1", "head.norm"])
def test_a_member_that_fails_ends_the_step_and_the_next_one_works(where):
    model = make_net()
    calls = []

    def fail(module, *_):
        calls.append(module)
        if len(calls) == 3:
            raise ValueError("the third call fails")

    hook = model.get_submodule(where).register_forward_hook(fail)
    plan = mesh(model, "1f1b", 2, 1, 2)
    with pk.Pipeline(
        model, plan, loss=net_loss, optimizer=momentum, clip_norm=CLIP, seed=3,
        deadline_seconds=DEADLINE_SECONDS,
    ) as pipeline:  # fmt: skip
        with pytest.raises(pk.errors.StageError, match="the third call fails"):
            pipeline.step(*batches()[0])
        hook.remove()
        for batch in batches():
            pipeline.step(*batch)
    assert_same(model, on_one_device()[1], TOLERANCE)


def test_members_of_whom_one_has_come_through_a_first_run_and_one_has_not_start_over_alike():
    """The other rank fails while one of them waits for the last part of the other's output, so that
    this one has compared the layer with one device, and that one will have to."""
    model = make_net()
    calls, armed, held = Counter(), True, threading.Event()
    plan = mesh(model, "1f1b", 2, 1, 2)
    with pk.Pipeline(
        model, plan, loss=net_loss, optimizer=momentum, clip_norm=CLIP, seed=3,
        deadline_seconds=DEADLINE_SECONDS,
    ) as pipeline:  # fmt: skip
        inboxes = pipeline._parts.workers[0].channels._exchange.inboxes
        under_way = pipeline._parts.feed._driver._under_way

        def hold(module, *_):
            calls[module] += 1
            if armed and calls[module] == 2 and module.membership.group.index == 0:
                held.set()
                (ticket,) = under_way
                assert until(lambda: ticket.results[3] or ticket.errors[3])

        def fail(module, *_):
            calls[module] += 1
            if armed and calls[module] == 2:
                held.wait(DEADLINE_SECONDS)
                assert until(lambda: not inboxes[2].empty())
                raise ValueError("in the second microbatch")

        # Behind its last call, a layer has only its output to put together.
        model.blocks[1].dropout.register_forward_hook(hold)
        model.embed.dropout.register_forward_hook(fail)
        with pytest.raises(pk.errors.StageError, match="in the second microbatch"):
            pipeline.step(*batches()[0])
        armed = False
        for batch in batches():
            pipeline.step(*batch)
    assert_same(model, on_one_device()[1], TOLERANCE)


def test_what_the_caller_does_to_the_model_between_steps_counts():
    ours, theirs = without_dropout(), without_dropout()
    one = OneDevice(theirs, MICROBATCHES, net_loss, momentum)
    plan = mesh(ours, "1f1b", 2, 1, 2)
    with pk.Pipeline(
        ours, plan, loss=net_loss, optimizer=momentum, seed=3, deadline_seconds=DEADLINE_SECONDS
    ) as pipeline:
        for step, batch in enumerate(batches()):
            for model in (ours, theirs):
                with torch.no_grad():
                    model.blocks[0].mlp[0].weight.mul_(0.9)
                model.blocks[1].mix.bias.requires_grad_(step > 0)
            pipeline.step(*batch)
            one.step(*batch)
            assert_same_values(pipeline.state_dict(), theirs.state_dict(), TOLERANCE)


def of_sizes(model, schedule, replicas, sizes):
    """A mesh whose stages are groups of different sizes."""
    splits = {key: how for key, how in SPLITS.items() if "mix" not in key and "project" not in key}
    splits["blocks.1"] = "data"
    plan = make_plan(model, len(sizes), MICROBATCHES, schedule, [3])
    built = families.build(
        schedule, num_ranks=sum(replicas), num_microbatches=MICROBATCHES, replicas=replicas
    )
    plan = replace(
        plan,
        options={"replicas": list(replicas)},
        stages=tuple(
            replace(stage, rank=built.ranks_of(index)[0]) for index, stage in enumerate(plan.stages)
        ),
    ).with_tensor_split(2, splits)
    stages = [
        replace(stage, tensor_ranks=size, splits=stage.splits if size > 1 else {})
        for stage, size in zip(plan.stages, sizes, strict=True)
    ]
    return replace(plan, stages=tuple(stages))


@pytest.mark.parametrize(
    ("replicas", "sizes"),
    [((1, 1), (2, 1)), ((1, 1), (1, 2)), ((1, 1), (2, 3)), ((1, 1), (3, 2)), ((3, 1), (1, 4))],
)
def test_groups_of_different_sizes_hand_over_slices_and_share_tied_weights(replicas, sizes):
    model = make_net()
    plan = of_sizes(model, "1f1b", replicas, sizes)
    assert plan.num_seats == sum(count * size for count, size in zip(replicas, sizes, strict=True))
    losses = train(model, plan)
    expected, theirs = on_one_device()
    assert same(losses, expected, TOLERANCE)
    assert_same(model, theirs, TOLERANCE)
