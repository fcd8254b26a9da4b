"""The replay's corrections, predictions and refusals."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from penstock import versions
from penstock.base.errors import InputError, ModelError
from penstock.trial.reference.delayed_replay import DelayedReplay
from penstock.trial.reference.single_device import SingleDevice
from tests.kit.helpers import make_batch, make_mlp
from tests.kit.one_device import assert_same
from tests.kit.scalar_replays import (
    RATE,
    WEIGHTS,
    XS,
    YS,
    batches,
    close,
    half_square,
    make_chain,
    pass_through,
    recurrence,
    sgd,
    trained,
)

# PipeMare's techniques


def test_t1_starts_with_smaller_steps():
    p, anneal = 3, 4

    def newest(s, k):
        return max(0, k - (p - 1 - s))

    def own(s, k):
        return k

    def rate(s, n):
        tau = p - 1 - s
        return RATE / max(1, tau) ** (1 - min(n / anneal, 1))

    policy = versions.PipeMare(updates="microbatch", t1=anneal)
    expected = recurrence(p, 1, newest, own, rate=rate)
    assert trained(policy, p, batches(1)) == close(expected)


def test_t1_counts_asynchronous_updates_of_a_whole_life():
    rates = []

    class Heard(torch.optim.SGD):
        def step(self, closure=None):
            rates.append(self.param_groups[0]["lr"])
            super().step(closure)

    policy = versions.PipeMare(updates="microbatch", t1=4, t3=2, delays="published")
    trained(policy, 1, batches(1, 3), batches(1, 2), optimizer=lambda p: Heard(p, lr=RATE))
    assert rates == [RATE] * 5  # τ is 1
    rates.clear()
    trained(policy, 2, batches(1, 3), batches(1, 5), optimizer=lambda p: Heard(p, lr=RATE))
    factors = [1, 1, 3**-1, 3**-0.75, 3**-0.5, 3**-0.25, 1, 1]
    assert rates[::2] == close([RATE * factor for factor in factors])


@pytest.mark.parametrize("synchronous", [0, 2])
@pytest.mark.parametrize("delays", ["published", "schedule"])
def test_t2_corrects_the_weights_of_the_backward(delays, synchronous):
    """δ follows the weights through synchronous minibatches, which read no correction."""
    p, decay = 3, 0.2
    policy = versions.PipeMare(updates="microbatch", t2=decay, delays=delays, t3=synchronous)
    taus = [2 * (p - 1 - s) + 1 if delays == "published" else p - 1 - s for s in range(p)]
    history, drift = [[weight] for weight in WEIGHTS], [0.0] * p
    for k, (x, y) in enumerate(zip(XS, YS, strict=True)):
        reads = backs = [one[-1] for one in history]
        if k >= synchronous:
            reads = [history[s][max(synchronous, k - (p - 1 - s))] for s in range(p)]
            backs = [history[s][k] - taus[s] * drift[s] for s in range(p)]
        for s, gradient in enumerate(pass_through(reads, backs, x, y)):
            step = -RATE * gradient
            history[s].append(history[s][-1] + step)
            gamma = decay ** (1 / taus[s]) if taus[s] else 0.0
            drift[s] = gamma * drift[s] + (1 - gamma) * step
    assert trained(policy, p, batches(1)) == close([one[-1] for one in history])


def test_t3_is_synchronous_at_first_and_only_once_in_a_life():
    ours, theirs = make_mlp(0.5), make_mlp(0.5)
    policy = versions.PipeMare(t3=2, t1=5, t2=0.3)
    replay = DelayedReplay(ours, (3, 3), policy, 2, F.cross_entropy, sgd, seed=0)
    device = SingleDevice(theirs, 2, F.cross_entropy, sgd, seed=0)
    data = [make_batch(6, seed=seed) for seed in range(4)]
    replay.train(data[:1])
    assert replay.reads == []
    device.step(*data[0])
    assert_same(ours, theirs)
    losses = replay.train(data[1:])
    assert torch.equal(losses[0], device.step(*data[1]))
    assert [read.microbatch for read in replay.reads[::2]] == [0, 1, 2, 3]
    assert [read.forward_version for read in replay.reads[::2]] == [0, 0, 0, 1]


# Prediction


class Momentum:
    """SGD with momentum, on one number."""

    def __init__(self, weight):
        self.weights, self.velocities = [weight], [0.0]

    def step(self, gradient):
        first = len(self.weights) == 1
        self.velocities.append(gradient if first else 0.9 * self.velocities[-1] + gradient)
        self.weights.append(self.weights[-1] - RATE * self.velocities[-1])

    def ahead(self, version, steps):
        return self.weights[version] - steps * RATE * self.velocities[version]


class AdamW:
    """AdamW, on one number; without decay, Adam."""

    def __init__(self, weight, decay):
        self.weights, self.means, self.squares, self.decay = [weight], [0.0], [0.0], decay

    def step(self, gradient):
        self.means.append(0.8 * self.means[-1] + 0.2 * gradient)
        self.squares.append(0.9 * self.squares[-1] + 0.1 * gradient**2)
        weight = self.weights[-1] * (1 - RATE * self.decay)
        self.weights.append(weight - RATE * self.direction(len(self.means) - 1))

    def direction(self, t):
        return self.means[t] / (1 - 0.8**t) / (math.sqrt(self.squares[t] / (1 - 0.9**t)) + 1e-3)

    def ahead(self, version, steps):
        weight = self.weights[version]
        if not version:
            return weight
        return weight - steps * RATE * (self.direction(version) + self.decay * weight)


ADAM = {"lr": RATE, "betas": (0.8, 0.9), "eps": 1e-3}
FORESEEN = {
    "momentum": (lambda p: torch.optim.SGD(p, lr=RATE, momentum=0.9), Momentum),
    "adam": (lambda p: torch.optim.Adam(p, **ADAM), lambda w: AdamW(w, 0.0)),
    "adamw": (
        lambda p: torch.optim.AdamW(p, weight_decay=0.1, **ADAM),
        lambda w: AdamW(w, 0.1),
    ),
}


@pytest.mark.parametrize("rule", ["pipeoptim", "spectrain"])
@pytest.mark.parametrize("optimizer", FORESEEN)
@pytest.mark.parametrize("p", [1, 2, 3])
def test_prediction(p, optimizer, rule):
    made, twin = FORESEEN[optimizer]
    twins = [twin(weight) for weight in WEIGHTS[:p]]
    for k, (x, y) in enumerate(zip(XS, YS, strict=True)):
        reads, backs = [], []
        for s, one in enumerate(twins):
            extra = s // 2 if rule == "spectrain" else 0
            reads.append(one.ahead(max(0, k - (p - 1 - s)), p - 1 - s + extra))
            backs.append(one.ahead(k, extra))
        for one, gradient in zip(twins, pass_through(reads, backs, x, y), strict=True):
            one.step(gradient)
    found = trained(versions.Predict(rule=rule), p, batches(1), optimizer=made)
    assert found == close([one.weights[-1] for one in twins])


def test_prediction_takes_the_rate_of_its_time():
    """A rate that falls to 0 after the second update: nothing is foreseen from then on."""
    optimizer = FORESEEN["momentum"][0]
    seen = []

    def loss(output, target):
        seen.append(output.item())
        return half_square(output, target)

    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Identity())
    replay = DelayedReplay(
        model,
        (1, 1),
        versions.Predict(),
        1,
        loss,
        optimizer,
        lr_scheduler=lambda made: torch.optim.lr_scheduler.LambdaLR(made, lambda n: n < 2),
    )
    one = torch.ones(1, 1)
    replay.train([(one, one)] * 5)
    assert seen[4] == pytest.approx(model[0].weight.item())
    assert seen[2] != pytest.approx(seen[4])


# What an optimizer is given, and what is refused


def test_the_factory_hears_whose_parameters_they_are():
    given_ = []

    def optimizer(parameters):
        names = [name for name, _ in parameters.named()]
        given_.append((parameters.stage, parameters.num_stages, parameters.delay, names))
        return sgd(parameters)

    trained(versions.Stash(), 3, optimizer=optimizer)
    assert given_ == [
        (0, 3, 2.0, ["0.weight"]),
        (1, 3, 1.0, ["2.weight"]),
        (2, 3, 0.0, ["4.weight"]),
    ]
    given_.clear()
    trained(versions.Stash(updates="minibatch"), 3, m=4, optimizer=optimizer)
    assert [delay for _, _, delay, _ in given_] == [0.5, 0.25, 0.0]
    given_.clear()
    policy = versions.PipeMare()
    trained(policy, 2, m=4, optimizer=optimizer, replicas=(2, 1))
    assert [delay for _, _, delay, _ in given_] == [0.5, 0.0]


def test_each_stage_is_clipped_for_itself():
    limit = 1e-3
    found = trained(versions.Stash(), 2, batches(1, 1), clip_stage_norm=limit)
    gradients = pass_through(WEIGHTS[:2], WEIGHTS[:2], XS[0], YS[0])
    steps = [g * limit / (abs(g) + 1e-6) for g in gradients]
    assert found == close(
        [weight - RATE * step for weight, step in zip(WEIGHTS, steps, strict=False)]
    )


def test_a_scheduler_steps_after_each_update():
    def scheduler(optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def newest(s, k):
        return max(0, k - (1 - s))

    expected = recurrence(2, 1, newest, newest, rate=lambda s, n: RATE * 0.5**n)
    assert trained(versions.Stash(), 2, batches(1), lr_scheduler=scheduler) == close(expected)


@pytest.mark.parametrize("whole", [True, False])
def test_layers_of_one_stage_may_share_weights(whole):
    """A layer in two places, or two layers with one weight."""

    def build():
        model = make_mlp(0.0)
        second = model[3]
        if not whole:
            second = nn.Linear(32, 32)
            second.weight = model[3].weight
        return model.insert(4, second)

    ours, theirs = build(), build()
    before = [module.weight for module in ours[3:5]]
    replay = DelayedReplay(ours, (3, 4), versions.Flush(), 2, F.cross_entropy, sgd)
    device = SingleDevice(theirs, 2, F.cross_entropy, sgd)
    for seed in range(2):
        replay.train([make_batch(6, seed=seed)])
        device.step(*make_batch(6, seed=seed))
    assert_same(ours, theirs)
    assert all(module.weight is one for module, one in zip(ours[3:5], before, strict=True))
    with pytest.raises(ModelError, match="stage 1 shares"):
        DelayedReplay(ours, (4, 3), versions.Stash(), 2, F.cross_entropy, sgd)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"cuts": (2, 1)}, "4 in all"),
        ({"cuts": (4, 0)}, "at least one"),
        ({"cuts": ()}, "at least one"),
        ({"versions": "stash"}, "give a policy"),
        ({"num_microbatches": 0}, "≥ 1"),
        ({"replicas": (2,)}, "each of the 2 stages"),
        ({"replicas": (2, 0)}, "≥ 1"),
        ({"versions": versions.Predict(), "optimizer": torch.optim.RMSprop}, "RMSprop"),
        (
            {
                "versions": versions.Predict(),
                "optimizer": lambda p: torch.optim.Adam(p, amsgrad=True),
            },
            "amsgrad",
        ),
    ],
)
def test_what_cannot_be_replayed_is_refused(wrong, message):
    right = {
        "cuts": (2, 2),
        "versions": versions.Stash(),
        "num_microbatches": 2,
        "loss": half_square,
        "optimizer": sgd,
    }
    with pytest.raises(InputError, match=message):
        DelayedReplay(make_chain(2), **(right | wrong))


def test_an_empty_stream_changes_nothing():
    replay = DelayedReplay(make_chain(2), (2, 2), versions.Stash(), 1, half_square, sgd)
    assert replay.train([]) == [] == replay.reads
    assert trained(versions.Stash(), 2, []) == list(WEIGHTS[:2])
