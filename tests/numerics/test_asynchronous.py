"""Asynchronous training equals the sequential replay of its delays, to the bit.

The replay (``run/delayed_replay.py``) has no pipeline and shares no code with the engine: it keeps
every version of every stage's weights and applies literally the versions that a policy states.
"""

import pytest
import torch
from torch import nn

import penstock as pk
from penstock import versions
from penstock.trial.reference.delayed_replay import DelayedReplay
from tests.kit.examples import crossed, in_turns, more
from tests.kit.streams import batches, cuts_of, layered_model, plan_for

POLICIES = {
    "flush": versions.Flush(),
    "latest": versions.Latest(),
    "latest per minibatch": versions.Latest(updates="minibatch"),
    "stash": versions.Stash(),
    "stash per minibatch": versions.Stash(updates="minibatch"),
    "vertical sync": versions.VerticalSync(),
    "2bw": versions.DoubleBuffer(),
    "pipemare t1": versions.PipeMare(t1=6),
    "pipemare t2": versions.PipeMare(t2=0.3),
    "pipemare t3": versions.PipeMare(t3=2),
    "pipemare": versions.PipeMare(t1=6, t2=0.3, t3=1, updates="microbatch"),
    "pipemare published": versions.PipeMare(t1=6, t2=0.3, delays="published"),
    "pipeoptim": versions.Predict(),
    "spectrain": versions.Predict(rule="spectrain"),
}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.03, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}
SIZES = (8, 8, 8, 8, 6, 8)


def train_both(plan, data, optimizer, **how):
    """(weights and losses of the engine, those of the replay, the pipeline's delays)."""
    model, other = layered_model(), layered_model()
    with pk.Pipeline(
        model, plan, loss=nn.functional.mse_loss, optimizer=optimizer, seed=3, **how
    ) as pipeline:
        losses = list(pipeline.steps(data))
        timeline = pipeline.timeline
    replay = DelayedReplay(
        other,
        cuts_of(plan),
        plan.versions,
        plan.num_microbatches,
        nn.functional.mse_loss,
        optimizer,
        replicas=plan.replicas,
        seed=3,
        **{key: how[key] for key in how if key in ("clip_stage_norm", "lr_scheduler", "reduction")},
    )
    replayed = replay.train(data)
    return (model, losses), (other, replayed), timeline, replay


def assert_equal(engine, replay, exactly=True):
    (model, losses), (other, replayed) = engine, replay
    for (name, ours), theirs in zip(
        model.state_dict().items(), other.state_dict().values(), strict=True
    ):
        if exactly:
            assert torch.equal(ours, theirs), name
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert len(losses) == len(replayed)
    for ours, theirs in zip(losses, replayed, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


RARE = [(1, "sgd"), (2, "adam"), (3, "sgd"), (4, "sgd"), (4, "adam")]
RARE += [(num_stages, "momentum") for num_stages in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("policy", "num_stages", "optimizer"),
    [
        *((policy, 3, "adam") for policy in POLICIES),
        *in_turns([(policy, *how) for how in ((1, "adam"), (2, "sgd")) for policy in POLICIES], 3),
        *(more(policy, *how) for how in RARE for policy in POLICIES),
    ],
)
def test_training_equals_the_replay_of_its_delays(policy, num_stages, optimizer):
    plan = plan_for(POLICIES[policy], num_stages, microbatches=4)
    # PipeMare's drift and prediction are sums in another order.
    exactly = not plan.versions.name.startswith(("pipemare", "predict"))
    engine, replay, _, _ = train_both(plan, batches(SIZES), OPTIMIZERS[optimizer])
    assert_equal(engine, replay, exactly)


REPLICATED = ["stash", "latest", "2bw", "stash per minibatch", "pipemare", "pipeoptim"]


@pytest.mark.parametrize(
    ("policy", "replicas"),
    [
        *crossed(REPLICATED, ("2-1", "1-2"), thorough=("stash",)),
        *(more(policy, how) for policy in REPLICATED for how in ("3-1", "2-1-1", "2-2")),
    ],
)
def test_replicated_stages_equal_the_replay(policy, replicas):
    plan = plan_for(POLICIES[policy], None, microbatches=4, replicas=replicas)
    for sizes in (SIZES, (8,), (7, 5, 8)):
        engine, replay, _, _ = train_both(plan, batches(sizes), OPTIMIZERS["adam"])
        assert_equal(engine, replay, exactly=False)
