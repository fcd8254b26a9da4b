"""Weights in half precision with masters in float32, wherever they are and however they travel."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import penstock as pk
from penstock.engine.masters import MASTER
from tests.kit.half_precision import MixedByHand, turns_of
from tests.kit.helpers import make_batch, make_mlp, make_plan
from tests.kit.reducing import replicated
from tests.kit.training import DEADLINE_SECONDS, adamw, momentum

HALF = torch.bfloat16
STEPS = 4
mixed = pk.optimizers.master_weights(adamw)


def pipeline_of(model, plan, **options):
    return pk.Pipeline(
        model, plan, **{
            "loss": F.cross_entropy, "optimizer": mixed, "transport": "threads",
            "deadline_seconds": DEADLINE_SECONDS, **options,
        },
    )  # fmt: skip


def model_of(dtype=HALF):
    return make_mlp(dropout=0.0, dtype=dtype)


def batches(dtype=HALF, rows=24):
    return [make_batch(rows, dtype, step) for step in range(STEPS)]


def trained(plan, dtype=HALF, **options):
    with pipeline_of(model_of(dtype), plan, **options) as pipeline:
        losses = [pipeline.step(*batch).item() for batch in batches(dtype)]
        masters = {
            name: pipeline.optimizers.state[own][MASTER]
            for name, own in pipeline_parameters(pipeline)
            if own in pipeline.optimizers.state
        }
        return losses, pipeline.gather_state_dict(), masters


def pipeline_parameters(pipeline):
    by_id = {id(own): own for own in pipeline.optimizers.state}
    return [(str(place), own) for place, own in enumerate(by_id.values())]


def by_hand(plan, dtype=HALF, **options):
    model = model_of(dtype)
    hand = MixedByHand(model, plan.num_microbatches, adamw, turns=turns_of(plan), **options)
    losses = [hand.step(*batch).item() for batch in batches(dtype)]
    return losses, model.state_dict()


PLANS = {
    "gpipe": lambda: make_plan(model_of(), 2, 4, "gpipe"),
    "1f1b": lambda: make_plan(model_of(), 3, 6),
    "split": lambda: make_plan(model_of(), 2, 4, "zb-h1"),
    "layers again": lambda: make_plan(model_of(), 2, 4, recompute="layers"),
    "stages again": lambda: make_plan(model_of(), 2, 4, recompute="stage"),
    "interleaved": lambda: make_plan(model_of(), 2, 4, "interleaved-1f1b"),
    "copies": lambda: replicated(model_of(), (2, 2), 8),
    "uneven copies": lambda: replicated(model_of(), (3,), 6),
}


@pytest.mark.parametrize("name", [*PLANS])
def test_as_by_hand_to_the_bit(name):
    plan = PLANS[name]()
    losses, weights, _ = trained(plan)
    wanted, others = by_hand(plan)
    assert losses == wanted
    for key, value in others.items():
        assert weights[key].dtype == HALF
        assert torch.equal(weights[key], value), key


def test_float16_with_a_loss_scale():
    plan = make_plan(model_of(torch.float16), 2, 4)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    losses, weights, _ = trained(plan, torch.float16, grad_scaler=scaler)
    wanted, others = by_hand(plan, torch.float16, scale=1024.0)
    assert losses == wanted
    assert all(torch.equal(weights[key], value) for key, value in others.items())


def test_a_step_that_overflows_changes_no_master():
    plan = make_plan(model_of(torch.float16), 2, 4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)
    before = model_of(torch.float16).state_dict()
    with pipeline_of(model_of(torch.float16), plan, grad_scaler=scaler) as pipeline:
        pipeline.step(*batches(torch.float16)[0])
        after = pipeline.gather_state_dict()
        assert not pipeline.optimizers.state
    assert all(torch.equal(after[key], value) for key, value in before.items())


@pytest.mark.parametrize("options", [{"clip_norm": 0.05}, {"clip_stage_norm": 0.05}], ids=str)
def test_norms_are_those_of_float32(options):
    """Clipped by hand: of one stage, both limits are the same."""
    plan = make_plan(model_of(), 1, 4, "gpipe")
    losses, weights, _ = trained(plan, **options)
    model = model_of()
    hand = MixedByHand(model, 4, adamw)
    update = hand._update

    def clipped(sums):
        norm = torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(total) for total in sums])
        )
        update([total * torch.clamp(0.05 / (norm + 1e-6), max=1.0) for total in sums])

    hand._update = clipped
    wanted = [hand.step(*batch).item() for batch in batches()]
    assert losses == pytest.approx(wanted, rel=2**-7)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(weights[key], value, rtol=2**-7, atol=2**-9)


def test_stages_that_come_and_go_take_their_masters_along(tmp_path):
    tier = pk.Tier(kind="disk", folder=str(tmp_path))
    inputs, targets = make_batch(6, HALF)
    graph = pk.profile(
        model_of(), inputs, targets=targets, loss=F.cross_entropy, optimizer=mixed, repeats=1
    )
    plan = pk.plan(graph, pk.Cluster.local(1, tiers=[tier]), microbatches=4, spill="always")
    losses, weights, _ = trained(plan)
    wanted, others = by_hand(make_plan(model_of(), 1, 4, "gpipe"))
    assert losses == pytest.approx(wanted, rel=2**-7)
    for key, value in others.items():
        torch.testing.assert_close(weights[key], value, rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_streams_update_masters(schedule):
    """Of one stage nothing is late, so a stream is what one device does minibatch by minibatch."""
    plan = make_plan(model_of(), 2, 4, schedule)
    policy = pk.versions.Stash() if schedule == "pipedream" else pk.versions.DoubleBuffer()
    plan = plan.edited(versions=policy)
    with pipeline_of(model_of(), plan) as pipeline:
        losses = [float(result) for result in pipeline.steps(batches())]
        state = pipeline.optimizers.state
        assert all(own[MASTER].dtype == torch.float32 for own in state.values())
        assert all(torch.equal(own, kept[MASTER].to(HALF)) for own, kept in state.items())
    assert len(losses) == STEPS


def going_on(plan, folder, first, **options):
    with pipeline_of(model_of(), plan, **options) as pipeline:
        assert (pipeline.load(folder) or 0) == first
        losses = [
            pipeline.step(*make_batch(24, HALF, step)).item() for step in range(first, first + 2)
        ]
        pipeline.save(folder)
        return losses, pipeline.gather_state_dict()


def test_checkpoints_keep_masters_and_fit_other_layouts(tmp_path):
    """Each goes on from the one before, in another layout; sums of copies are in another order."""
    layouts = [
        make_plan(model_of(), 2, 4), make_plan(model_of(), 1, 4, "gpipe"),
        make_plan(model_of(), 3, 4, "zb-h1"),
    ]  # fmt: skip
    model = model_of()
    hand = MixedByHand(model, 4, adamw)
    for number, plan in enumerate(layouts):
        first = 2 * number
        losses, weights = going_on(plan, tmp_path, first)
        wanted = [hand.step(*make_batch(24, HALF, step)).item() for step in (first, first + 1)]
        assert losses == wanted
        assert all(torch.equal(weights[key], own) for key, own in model.state_dict().items())


def test_masters_are_not_rounded_by_a_checkpoint(tmp_path):
    plan = make_plan(model_of(), 2, 4)
    with pipeline_of(model_of(), plan) as pipeline:
        pipeline.step(*batches()[0])
        pipeline.save(tmp_path)
        kept = [own[MASTER].clone() for own in pipeline.optimizers.state.values()]
    with pipeline_of(model_of(), plan) as pipeline:
        pipeline.load(tmp_path)
        loaded = [own[MASTER] for own in pipeline.optimizers.state.values()]
    assert any(not torch.equal(own, own.to(HALF).float()) for own in kept)
    for own, other in zip(loaded, kept, strict=True):
        assert other.dtype == own.dtype == torch.float32
        assert torch.equal(own, other)


def test_a_checkpoint_without_masters_begins_with_the_weights(tmp_path):
    plan = make_plan(model_of(), 2, 4)
    with pipeline_of(model_of(), plan, optimizer=momentum) as pipeline:
        pipeline.step(*batches()[0])
        pipeline.save(tmp_path)
    with pipeline_of(
        model_of(), plan, optimizer=pk.optimizers.master_weights(momentum)
    ) as pipeline:
        pipeline.load(tmp_path)
        pipeline.step(*batches()[1])
        state = pipeline.optimizers.state
        assert all(torch.equal(own, kept[MASTER].to(HALF)) for own, kept in state.items())


def test_a_plan_knows_what_gradients_and_masters_take():
    inputs, targets = make_batch(6, HALF)
    measured = partial(pk.profile, repeats=1)
    for profile in (measured, partial(pk.estimate, device="H100-SXM")):
        graph = profile(model_of(), inputs, targets=targets, loss=F.cross_entropy, optimizer=mixed)
        weights = sum(layer.parameter_bytes for layer in graph.layers)
        assert sum(layer.summed_bytes for layer in graph.layers) == 2 * weights
        state = sum(layer.optimizer_bytes for layer in graph.layers)
        count = weights // 2
        assert 12 * count <= state <= 12 * count + 8 * 6  # and how many steps were made
        plan = pk.plan(graph, pk.Cluster.local(1), microbatches=2, stages=1)
        (parts,) = plan.memory_parts
        assert (parts.weights, parts.gradients) == (weights, 2 * weights)
        assert parts.optimizer == state
