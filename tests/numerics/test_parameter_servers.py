"""Parameter servers update as the copies would, to the bit, whatever is asked of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import LinearLR

import penstock as pk
from penstock.cluster import SpareMachine
from penstock.errors import InputError
from tests.kit.helpers import make_batch, make_mlp, make_plan
from tests.kit.reducing import replicated
from tests.kit.training import DEADLINE_SECONDS, adamw, momentum

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
    served = plan.summed_by("parameter-server", machines(servers))
    assert_equal(trained(served, **options), trained(plan, **options))


def test_servers_update_in_main_memory_what_is_on_accelerators(accelerator):
    plan = replicated(make_mlp(), (1, 2))
    served = plan.summed_by("parameter-server", machines(2))
    devices = ["emu:0", "emu:1", "emu:2"]
    assert_equal(trained(served, devices=devices, clip_norm=0.1), trained(plan, clip_norm=0.1))
    with pipeline_of(served.summed_by("parameter-server", stale=2), devices=devices) as pipeline:
        list(pipeline.steps(make_batch(24, seed=seed) for seed in range(4)))
    accelerator.check()


def test_both_directions_of_a_pipeline_are_served():
    plan = make_plan(make_mlp(), 2, 4, "chimera")
    assert_equal(trained(plan.summed_by("parameter-server")), trained(plan))


def test_checkpoints_go_from_servers_to_copies_and_back(tmp_path):
    plan = replicated(make_mlp(), (1, 2))
    served = plan.summed_by("parameter-server", machines(2))

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
    with pipeline_of(plan) as copies, pipeline_of(plan.summed_by("parameter-server")) as served:
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

    plan = replicated(make_mlp(), (2,)).summed_by("parameter-server")
    with (
        pytest.raises(pk.errors.StageError, match=r"rank 2.*no step") as caught,
        pipeline_of(plan, optimizer=breaks) as pipeline,
    ):
        pipeline.step(*make_batch(24))
    assert any("parameter server of stages 0" in note for note in caught.value.__notes__)


def test_what_servers_cannot_do_is_refused():
    plan = replicated(make_mlp(), (2,)).summed_by("parameter-server")
    with pytest.raises(InputError, match="post_validate undoes updates"):
        pipeline_of(plan, clip_norm=1.0, post_validate=True)
    with pytest.raises(InputError, match="Adafactor, the optimizer of stage 0, may need whole"):
        pipeline_of(plan, optimizer=torch.optim.Adafactor)
    with pytest.raises(InputError, match="'parameter-server' needs a flush"):
        make_plan(make_mlp(), 2, 4, "pipedream").summed_by("parameter-server")
