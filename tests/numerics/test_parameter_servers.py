"""Parameter servers update as the copies would, to the bit, whatever is asked of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import ExponentialLR, LinearLR

import penstock as pk
from penstock.base.errors import InputError
from penstock.core.cluster import SpareMachine
from penstock.core.schedule import Kind
from penstock.planning.plans.summing import (
    all_group_sizes,
    num_processes,
    server_ranks,
    servers_of,
    stages_held,
)
from tests.kit.examples import more
from tests.kit.groups import make_net, net_batch, net_loss
from tests.kit.helpers import make_batch, make_mlp, make_plan
from tests.kit.reducing import replicated
from tests.kit.training import DEADLINE_SECONDS, adamw, momentum
from tests.numerics.test_meshes import mesh, of_sizes, train
from tests.numerics.test_meshes import momentum as net_momentum

STEPS = 4


def machines(count):
    return [SpareMachine(name=f"spare{k}", bytes_per_second=1e9) for k in range(count)]


def pipeline_of(plan, *, optimizer=adamw, **options):
    return pk.Pipeline(
        make_mlp(), plan, loss=F.cross_entropy, optimizer=optimizer, seed=3, transport="threads",
        deadline_seconds=DEADLINE_SECONDS, **options,
    )  # fmt: skip


def trained(plan, **options):
    """(losses, weights) after some steps, of which the last ones have fewer rows."""
    if options.pop("scales", False):
        options["grad_scaler"] = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    with pipeline_of(plan, **options) as pipeline:
        batches = [make_batch(24 - 11 * (step > 1), seed=step) for step in range(STEPS)]
        losses = [*pipeline.steps(batches[:2]), *(pipeline.step(*batch) for batch in batches[2:])]
        losses.append(pipeline.evaluate(make_batch(5)[0]).sum().cpu())
        assert pipeline.timeline.makespan > 0
        return losses, {key: value.cpu().clone() for key, value in pipeline.state_dict().items()}


def assert_equal(ours, theirs):
    (losses, weights), (wanted, others) = ours, theirs
    assert losses == wanted
    for key, value in others.items():
        assert torch.equal(weights[key], value), key


@pytest.mark.parametrize(
    ("replicas", "servers", "options"),
    [
        ((3,), 1, {}),
        ((1, 2), 2, {"clip_norm": 0.1}),
        ((2, 2), 3, {"scales": True, "clip_norm": 0.5}),
        ((2,), 2, {"clip_stage_norm": 0.1}),
        (
            (2, 1),
            1,
            {
                "optimizer": momentum,
                "lr_scheduler": lambda one: LinearLR(one, total_iters=5),
            },
        ),
    ],
)
def test_servers_update_as_copies_do(replicas, servers, options):
    plan = replicated(make_mlp(), replicas)
    served = plan.with_reducer("parameter-server", machines(servers))
    assert_equal(trained(served, **options), trained(plan, **options))


def of_groups(replicas, sizes):
    """(a model, a plan whose stages are groups of tensor ranks) with weights that tensor ranks have
    terms of."""
    model = make_net()
    return model, of_sizes(model, "1f1b", replicas, sizes)


def trained_in_groups(way, replicas, sizes, servers=(), **options):
    model, plan = of_groups(replicas, sizes)
    losses = train(model, plan.with_reducer(way, servers), transport="threads", **options)
    return [*losses], {key: value.clone() for key, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("replicas", "sizes", "servers"),
    [((2, 1), (2, 1), 2), more((2, 2), (2, 1), 1), more((2, 2), (2, 3), 2)],
)
def test_servers_of_tensor_groups_update_as_copies_do(replicas, sizes, servers):
    groups = replicas, sizes
    served = trained_in_groups("parameter-server", *groups, machines(servers))
    assert_equal(served, trained_in_groups("owners", *groups))


def test_servers_of_groups_are_groups_and_only_of_the_stages_with_as_many_members():
    _, plan = of_groups((2, 2), (2, 1))
    served = plan.with_reducer("parameter-server", machines(2))
    assert server_ranks(served) == range(4, 8)
    assert all_group_sizes(served) == (2, 2, 1, 1, 1, 2, 1, 2)
    assert num_processes(served) == 12
    assert [servers_of(served, stage) for stage in range(2)] == [(5, 7), (4, 6)]
    assert [stages_held(served, rank) for rank in range(4, 8)] == [(1,), (0,), (1,), (0,)]


def test_checkpoints_of_groups_go_from_servers_to_copies_and_back(tmp_path):
    def going_on(ways, folder):
        for step, servers in enumerate(ways):
            model, plan = of_groups((2, 1), (2, 1))
            if servers:
                plan = plan.with_reducer("parameter-server", machines(servers))
            with pk.Pipeline(
                model, plan, loss=net_loss, optimizer=net_momentum, seed=3, transport="threads",
                deadline_seconds=DEADLINE_SECONDS,
            ) as pipeline:  # fmt: skip
                assert (pipeline.load(folder) or 0) == step
                pipeline.step(*net_batch(10, step))
                pipeline.save(folder)
                weights = pipeline.state_dict()
        return weights

    ours, theirs = going_on([1, 0, 2], tmp_path / "ours"), going_on([0] * 3, tmp_path / "theirs")
    assert all(torch.equal(ours[key], value) for key, value in theirs.items())


def test_copies_whose_weights_servers_update_show_the_options_that_were_loaded(tmp_path):
    plan = replicated(make_mlp(), (1, 2))
    served = plan.with_reducer("parameter-server", machines(1))
    options = {"lr_scheduler": lambda one: ExponentialLR(one, 0.5)}
    with pipeline_of(plan, **options) as pipeline:
        for group in pipeline.optimizers.param_groups:
            group["betas"] = (0.5, 0.9)
        pipeline.step(*make_batch(24))
        pipeline.save(tmp_path)
    for resumed in (served, plan):
        with pipeline_of(resumed, **options) as pipeline:
            assert pipeline.load(tmp_path) == 1
            for num_updates in (1, 2):
                rate = 0.01 * 0.5**num_updates
                assert {*pipeline.optimizers.learning_rates} == {rate}
                assert {*pipeline.schedulers.get_last_lr()} == {rate}
                groups = pipeline.optimizers.param_groups
                assert {group["betas"] for group in groups} == {(0.5, 0.9)}
                pipeline.step(*make_batch(24))


def test_servers_update_in_main_memory_what_is_on_accelerators(accelerator):
    plan = replicated(make_mlp(), (1, 2))
    served = plan.with_reducer("parameter-server", machines(2))
    devices = ["emu:0", "emu:1", "emu:2"]
    assert_equal(trained(served, devices=devices, clip_norm=0.1), trained(plan, clip_norm=0.1))
    with pipeline_of(served.with_reducer("parameter-server", stale=2), devices=devices) as pipeline:
        list(pipeline.steps(make_batch(24, seed=seed) for seed in range(4)))
    accelerator.check()


@pytest.mark.parametrize("stale", [0, 2])
def test_timelines_show_what_servers_have_predicted_and_measured(stale):
    plan = replicated(make_mlp(), (1, 2))
    served = plan.with_reducer("parameter-server", machines(1 if stale else 2), stale=stale)
    expected = {(rank, server) for rank in (1, 2) for server in range(1 if stale else 2)}
    predicted = [one for one in served.simulate().transfers if one.kind == "served"]
    assert {(*one.ranks, one.number) for one in predicted} == expected
    with pipeline_of(served) as pipeline:
        for _ in range(2):
            pipeline.step(*make_batch(24))
        measured = pipeline.timeline
    boxes = [one for one in measured.transfers if one.kind == "served"]
    assert {(*one.ranks, one.number, one.stage) for one in boxes} == {(*key, 1) for key in expected}
    for box in boxes:
        backwards = [
            span.start for span in measured.by_rank[box.ranks[0]] if span.op.kind is Kind.BACKWARD
        ]
        assert max(backwards) < box.start < box.end


def test_both_directions_of_a_pipeline_are_served():
    plan = make_plan(make_mlp(), 2, 4, "chimera")
    assert_equal(trained(plan.with_reducer("parameter-server")), trained(plan))


def test_checkpoints_go_from_servers_to_copies_and_back(tmp_path):
    plan = replicated(make_mlp(), (1, 2))
    served = plan.with_reducer("parameter-server", machines(2))

    def going_on(ways, folder):
        for step, way in enumerate(ways):
            with pipeline_of(way) as pipeline:
                assert (pipeline.load(folder) or 0) == step
                pipeline.step(*make_batch(24, seed=step))
                pipeline.save(folder)
                weights = pipeline.state_dict()
        return weights

    ours = going_on([served, served, plan, served], tmp_path / "ours")
    theirs = going_on([plan] * 4, tmp_path / "theirs")
    assert all(torch.equal(ours[key], value) for key, value in theirs.items())
    saved = {path.name for path in (tmp_path / "ours" / "step-00000002").glob("*.safetensors")}
    assert saved == {
        "stage-0.safetensors", *(f"stage-1.part-{part}.safetensors" for part in range(3)),
    }  # fmt: skip


def test_weights_that_the_caller_changes_reach_the_servers():
    plan = replicated(make_mlp(), (2,))
    with pipeline_of(plan) as copies, pipeline_of(plan.with_reducer("parameter-server")) as served:
        for pipeline in (copies, served):
            pipeline.step(*make_batch(24))
            with torch.no_grad():
                pipeline._model[0].weight.mul_(0.5)
            pipeline.step(*make_batch(24, seed=2))
        ours, theirs = served.state_dict(), copies.state_dict()
    assert all(torch.equal(ours[key], value) for key, value in theirs.items())


def test_a_server_that_cannot_step_says_so_and_nobody_hangs():
    def breaks(parameters):
        optimizer = adamw(parameters)

        def hook(optimizer, *_):
            if optimizer.param_groups[0]["params"]:
                raise ValueError("no step")

        optimizer.register_step_pre_hook(hook)
        return optimizer

    plan = replicated(make_mlp(), (2,)).with_reducer("parameter-server")
    with (
        pytest.raises(pk.errors.StageError, match=r"rank 2.*no step") as caught,
        pipeline_of(plan, optimizer=breaks) as pipeline,
    ):
        pipeline.step(*make_batch(24))
    assert any("parameter server of stages 0" in note for note in caught.value.__notes__)


def test_what_servers_cannot_do_is_refused():
    plan = replicated(make_mlp(), (2,)).with_reducer("parameter-server")
    with pytest.raises(InputError, match="post_validate undoes updates"):
        pipeline_of(plan, clip_norm=1.0, post_validate=True)
    with pytest.raises(InputError, match="Adafactor, the optimizer of stage 0, may need whole"):
        pipeline_of(plan, optimizer=torch.optim.Adafactor)
    with pytest.raises(InputError, match="'parameter-server' needs a flush"):
        make_plan(make_mlp(), 2, 4, "pipedream").with_reducer("parameter-server")
    model = make_net()  # in one stage: nothing is tied, but tensor ranks have terms
    plan = mesh(model, "1f1b", 1, 2, 2)
    with pytest.raises(InputError, match="compute with weights of the same update"):
        plan.with_reducer("parameter-server", stale=1)
    with pytest.raises(InputError, match="clip_stage_norm needs all gradients of a stage"):
        pk.Pipeline(
            model, plan.with_reducer("parameter-server"), loss=net_loss, optimizer=net_momentum,
            transport="threads", clip_stage_norm=1.0,
        )  # fmt: skip
