"""What a reviewer broke: routed layers, references of one's own, writes in a forward, loaders."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as pk
from penstock import versions
from penstock.base.errors import InputError, StageError
from penstock.trial.reference.delayed_replay import DelayedReplay
from tests.kit.examples import in_turns, more
from tests.kit.streams import batches, cuts_of, layered_model, plan_for
from tests.numerics.test_asynchronous import OPTIMIZERS, POLICIES


class Switch(nn.Module):
    """Runs one of two branches; the other one gets no gradient."""

    def __init__(self):
        super().__init__()
        self.one, self.other = (
            nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(2)
        )

    def forward(self, value):
        return (self.one if value[0, 0] > 0 else self.other)(value)


def switching_model():
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Sequential(Switch(), nn.Tanh()) for _ in range(4)]).double()


SWITCHED = ["stash", "vertical sync", "2bw", "latest", "pipeoptim"]
USUAL = [(None, "sgd"), (None, "momentum"), ("2-1", "momentum"), ("2-2", "sgd")]
RARE = [("2-1", "sgd"), ("2-2", "momentum"), ("3-1", "sgd"), ("3-1", "momentum")]


@pytest.mark.parametrize(
    ("policy", "replicas", "optimizer"),
    [
        *in_turns([(policy, *how) for policy in SWITCHED for how in USUAL], 3),
        *(more(policy, *how) for policy in SWITCHED for how in RARE),
    ],
)
def test_parameters_without_a_gradient_in_some_updates(policy, replicas, optimizer):
    if policy == "vertical sync" and replicas in ("2-1", "3-1"):
        pytest.skip("vertical sync wants as many replicas of every stage")
    model, other = switching_model(), switching_model()
    stages = None if replicas else 3
    plan = plan_for(POLICIES[policy], stages, microbatches=4, replicas=replicas, model=model)
    data, make = batches([4] * 8), OPTIMIZERS[optimizer]
    with pk.Pipeline(model, plan, loss=F.mse_loss, optimizer=make, seed=1) as pipeline:
        losses = list(pipeline.steps(data))
    replay = DelayedReplay(
        other, cuts_of(plan), plan.versions, 4, F.mse_loss, make, seed=1, replicas=plan.replicas
    )
    torch.testing.assert_close(losses, replay.train(data), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=1e-12, atol=1e-12)


class OwnReference(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.references = [self.linear.weight, self.linear.bias]

    def forward(self, value):
        return F.linear(value, *self.references)


class Clamping(nn.Linear):
    def forward(self, value):
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(value)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (OwnReference, r"computes with Linear\.bias through a reference of its own"),
        (lambda: Clamping(6, 6), r"a forward has written into Clamping\.weight"),
    ],
)
@pytest.mark.parametrize("policy", ["stash", "2bw", "vertical sync", "pipeoptim"])
def test_layers_that_would_miss_their_version_are_refused(policy, layer, message):
    model = nn.Sequential(layer(), nn.Tanh(), nn.Linear(6, 6)).double()
    plan = plan_for(POLICIES[policy], 2, microbatches=2, model=model)
    make = OPTIMIZERS["momentum"]
    with (
        pk.Pipeline(model, plan, loss=F.mse_loss, optimizer=make) as pipeline,
        pytest.raises(StageError, match=message),
    ):
        list(pipeline.steps(batches([4] * 4)))


INPUTS, TARGETS = batches([4])[0]


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ([INPUTS, TARGETS], "minibatch 0 of the loader is a Tensor, .*give pairs"),
        ([(INPUTS, TARGETS), (INPUTS, TARGETS, 3)], "minibatch 1 of the loader is a tuple of 3"),
        (
            [{"inputs": INPUTS, "targets": TARGETS}],
            "minibatch 0 of the loader has inputs, targets, and no labels",
        ),
        (None, "the loader is of type NoneType"),
    ],
)
@pytest.mark.parametrize("policy", ["flush", "stash"])
def test_a_loader_that_yields_no_pairs_is_refused(policy, loader, message):
    plan = plan_for(POLICIES[policy], 2, microbatches=2)
    with (
        pk.Pipeline(
            layered_model(), plan, loss=F.mse_loss, optimizer=OPTIMIZERS["sgd"]
        ) as pipeline,
        pytest.raises(InputError, match=message),
    ):
        list(pipeline.steps(loader))


def test_a_pipeline_closed_in_its_own_loop_says_so():
    plan = plan_for(versions.Stash(), 2, microbatches=2)
    with (
        pk.Pipeline(
            layered_model(), plan, loss=F.mse_loss, optimizer=OPTIMIZERS["sgd"]
        ) as pipeline,
        pytest.raises(InputError, match="this Pipeline is closed"),
    ):
        for _ in pipeline.steps(batches([4] * 9)):
            pipeline.close()


def test_an_optimizer_that_wants_a_closure_is_refused():
    for policy in ("flush", "stash"):
        plan = plan_for(POLICIES[policy], 2, microbatches=2)
        with pytest.raises(InputError, match="LBFGS calls the loss several times"):
            pk.Pipeline(layered_model(), plan, loss=F.mse_loss, optimizer=torch.optim.LBFGS)


def test_synchronous_minibatches_of_pipemare_need_one_microbatch_per_replica():
    policy = versions.PipeMare(t3=1, updates="microbatch")
    with pytest.raises(InputError, match="t3 makes synchronous have 2 microbatches"):
        plan_for(policy, None, microbatches=2, replicas="3-1")
