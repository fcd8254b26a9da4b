"""The replay: against recurrences written out with plain numbers, and against laws."""

from __future__ import annotations

import math
from statistics import fmean

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from penstock import versions
from penstock.core.schedule import Kind, families
from penstock.core.schedule.lower import add_updates
from penstock.core.schedule.rounds import Rounds, warm_up
from penstock.trial.reference.delayed_replay import DelayedReplay
from penstock.trial.reference.single_device import SingleDevice
from tests.kit.examples import more
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
from tests.kit.tiny_models import conv_batch, make_conv_net


def test_three_microbatches_of_stashing_written_out():
    """Two stages: the first reads w0 twice, then w1; the second is always up to date."""
    (a0, b0), (x0, x1, x2), (y0, y1, y2) = WEIGHTS[:2], XS[:3], YS[:3]
    ga, gb = pass_through([a0, b0], [a0, b0], x0, y0)
    a1, b1 = a0 - RATE * ga, b0 - RATE * gb
    ga, gb = pass_through([a0, b1], [a0, b1], x1, y1)
    a2, b2 = a1 - RATE * ga, b1 - RATE * gb
    ga, gb = pass_through([a1, b2], [a1, b2], x2, y2)
    expected = [a2 - RATE * ga, b2 - RATE * gb]
    assert trained(versions.Stash(), 2, batches(1, 3)) == close(expected)


def test_a_backward_without_stash_goes_through_newer_weights():
    """In two stages, the only weight that a gradient goes through is that of the last one, which is
    up to date in both passes; in three stages, the middle one's has moved on in between."""
    for p, same in [(2, True), (3, False)]:
        stashed = trained(versions.Stash(), p, batches(1))
        assert (trained(versions.Latest(), p, batches(1)) == stashed) is same


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 2, 5, 11])
def test_updates_per_microbatch(p, count):
    def newest(s, k):
        return max(0, k - (p - 1 - s))

    def synced(s, k):
        return max(0, k - (p - 1))

    def own(s, k):
        return k

    cases = [
        (versions.Stash(), newest, newest),
        (versions.VerticalSync(), synced, synced),
        (versions.Latest(), newest, own),
        (versions.PipeMare(updates="microbatch"), newest, own),
        (versions.Predict(), newest, own),  # SGD without momentum foresees no change
    ]
    for policy, forward, backward in cases:
        for m in (1, 4):  # how many make a minibatch is of no consequence
            found = trained(policy, p, batches(m, count), m=m)
            expected = recurrence(p, 1, forward, backward, count)
            assert found == close(expected), (policy, m)


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("m", [1, 2, 3, 5])
def test_updates_per_minibatch(p, m):
    def newest(s, k):
        return max(0, k - (p - 1 - s)) // m

    def own(s, k):
        return k // m

    def last_but_one(s, k):
        return max(0, k // m - 1)

    cases = [
        (versions.Flush(), own, own),
        (versions.DoubleBuffer(), last_but_one, last_but_one),
        (versions.Stash(updates="minibatch"), newest, newest),
        (versions.Latest(updates="minibatch"), newest, own),
        (versions.PipeMare(), newest, own),
    ]
    for policy, forward, backward in cases:
        found = trained(policy, p, batches(m), m=m)
        assert found == close(recurrence(p, m, forward, backward)), policy


def test_losses_are_those_of_the_weights_that_forwards_read():
    """With vertical sync in two stages, microbatches 0 to 3 read versions 0, 0, 1 and 2."""

    def loss_of(k, version):
        weights = recurrence(2, 1, synced, synced, version)
        value = XS[k]
        for weight in weights:
            value = math.tanh(weight * value)
        return (value - YS[k]) ** 2 / 2

    def synced(s, k):
        return max(0, k - 1)

    replay = DelayedReplay(make_chain(2), (2, 2), versions.VerticalSync(), 3, half_square, sgd)
    losses = replay.train(batches(3, 4))
    assert [one.item() for one in losses] == close(
        [fmean([loss_of(0, 0), loss_of(1, 0), loss_of(2, 1)]), loss_of(3, 2)]
    )
    assert not any(one.requires_grad for one in losses)


def test_a_second_stream_begins_anew_with_the_weights_of_the_first():
    replay = DelayedReplay(make_chain(2), (2, 2), versions.Stash(), 1, half_square, sgd)
    replay.train(batches(1, 4))
    assert [read.microbatch for read in replay.reads] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [read.forward_version for read in replay.reads] == [0, 0, 0, 1, 1, 2, 2, 3]
    replay.train(batches(1, 2))
    assert replay.reads == [(0, 0, 0, 0, 0), (1, 0, 0, 0, 0), (0, 1, 0, 0, 1), (1, 1, 1, 1, 1)]
    assert [read.delay for read in replay.reads] == [0, 0, 1, 0]
    first, second = batches(1, 4), batches(1, 6)[4:]
    apart, together = (
        trained(versions.Stash(), 2, *s) for s in ((first, second), (first + second,))
    )
    assert apart != together
    assert apart == close(recurrence_of_two(4, 6))


def recurrence_of_two(middle, end):
    """Two stages with stashing, and a second stream that begins in the middle."""
    first, second = [WEIGHTS[0]], [WEIGHTS[1]]
    for k in range(end):
        fresh = k in (0, middle)  # nothing is in flight
        reads = [first[-1 if fresh else -2], second[-1]]
        gradients = pass_through(reads, reads, XS[k], YS[k])
        first.append(first[-1] - RATE * gradients[0])
        second.append(second[-1] - RATE * gradients[1])
    return [first[-1], second[-1]]


# Replicas


@pytest.mark.parametrize("replicas", [(2, 1), (2, 1, 1), (1, 2), (3, 2, 1), (2,)])
@pytest.mark.parametrize("count", [3, 4, 7, 10, 11])
def test_replicas_update_in_rounds_of_one_microbatch_each(replicas, count):
    p = len(replicas)
    warm_ups = [(sum(replicas[s:]) - 1) // replicas[s] for s in range(p)]
    history, held = [[weight] for weight in WEIGHTS[:p]], [[] for _ in range(p)]
    for k in range(count):
        reads = [history[s][max(0, k // replicas[s] - warm_ups[s])] for s in range(p)]
        gradients = pass_through(reads, reads, XS[k], YS[k])
        for s in range(p):
            held[s].append(gradients[s])
            if len(held[s]) == replicas[s] or k == count - 1:
                step = RATE * replicas[s] * sum(held[s]) / len(held[s])
                history[s].append(history[s][-1] - step)
                held[s] = []
    found = trained(versions.Stash(), p, batches(4, count), m=4, replicas=replicas)
    assert found == close([one[-1] for one in history])


def test_gradients_of_a_sum_are_summed_over_replicas():
    def summed(output, target):
        return ((output - target) ** 2 / 2).sum()

    model = make_chain(1)
    replay = DelayedReplay(
        model, [2], versions.Stash(), 1, summed, sgd, replicas=[2], reduction="sum"
    )
    replay.train(batches(1, 2))
    total = sum(pass_through(WEIGHTS[:1], WEIGHTS[:1], XS[k], YS[k])[0] for k in range(2))
    assert model[0].weight.item() == close(WEIGHTS[0] - RATE * total)


def test_rates_are_scaled_before_the_scheduler_is_made():
    made = []

    def scheduler(optimizer):
        made.append(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n))
        return made[-1]

    trained(versions.Stash(), 2, batches(1, 5), replicas=(2, 1), lr_scheduler=scheduler)
    assert [one.get_last_lr()[0] for one in made] == close([2 * RATE * 0.5**3, RATE * 0.5**5])


def test_replicas_sum_their_own_first_to_the_bit():
    ours, theirs = make_mlp(dropout=0.0), make_mlp(dropout=0.0)
    inputs, targets = make_batch(12)
    replay = DelayedReplay(ours, [6], versions.Flush(), 6, F.cross_entropy, sgd, replicas=[3])
    replay.train([(inputs, targets)])
    found = []
    for part, wanted in zip(inputs.split(2), targets.split(2), strict=True):
        loss = F.cross_entropy(theirs(part), wanted) * (2 / 12)
        found.append(torch.autograd.grad(loss, theirs.parameters()))
    with torch.no_grad():
        for parameter, a, b, c, d, e, f in zip(theirs.parameters(), *found, strict=True):
            parameter.add_(((a + d) + (b + e)) + (c + f), alpha=-RATE)  # as SGD does it
    assert_same(ours, theirs)
    assert all(parameter.grad is None for parameter in ours.parameters())


# Laws


@pytest.mark.parametrize("cuts", [(6,), (3, 3), (1, 2, 3), (1,) * 6])
@pytest.mark.parametrize("rows", [8, 7, 2])
def test_flush_is_one_device_to_the_bit(cuts, rows):
    def adam(parameters):
        return torch.optim.AdamW(parameters, lr=1e-2)

    ours, theirs = make_mlp(dropout=0.5), make_mlp(dropout=0.5)
    replay = DelayedReplay(ours, cuts, versions.Flush(), 3, F.cross_entropy, adam, seed=3)
    device = SingleDevice(theirs, 3, F.cross_entropy, adam, seed=3)
    data = [make_batch(rows, seed=seed) for seed in range(4)]
    found = replay.train(data[:3]) + replay.train(data[3:])
    expected = [device.step(*one) for one in data]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert_same(ours, theirs)


def test_flush_is_one_device_with_running_statistics():
    ours, theirs = make_conv_net(), make_conv_net()
    replay = DelayedReplay(ours, (3, 4, 3), versions.Flush(), 3, F.cross_entropy, sgd)
    device = SingleDevice(theirs, 3, F.cross_entropy, sgd)
    for seed in range(2):
        replay.train([conv_batch(7, seed)])
        device.step(*conv_batch(7, seed))
    assert_same(ours, theirs)


def test_terms_weigh_microbatches_and_none_count_nothing():
    def terms(targets):
        return (targets != -100).sum()

    ours, theirs = make_mlp(dropout=0.0), make_mlp(dropout=0.0)
    inputs, targets = make_batch(8)
    targets[:3] = -100
    replay = DelayedReplay(ours, (3, 3), versions.Flush(), 4, F.cross_entropy, sgd, weight=terms)
    device = SingleDevice(theirs, 4, F.cross_entropy, sgd, weight=terms)
    assert torch.equal(replay.train([(inputs, targets)])[0], device.step(inputs, targets))
    assert_same(ours, theirs)
    replay = DelayedReplay(ours, (3, 3), versions.Stash(), 4, F.cross_entropy, sgd, weight=terms)
    assert replay.train([(inputs, targets)])[0].isfinite()
    assert all(parameter.isfinite().all() for parameter in ours.parameters())


@pytest.mark.parametrize("policy", [cls() for cls in versions.POLICIES.values()], ids=str)
def test_draws_belong_to_the_minibatch_and_the_microbatch(policy):
    """Without steps, all policies compute what one device computes; with dropout too, also where
    the loss draws."""

    def dropping_loss(output, targets):
        return F.cross_entropy(F.dropout(output), targets)

    def still(parameters):
        return torch.optim.SGD(parameters, lr=0.0)

    data = [make_batch(6, seed=seed) for seed in range(3)]
    replay = DelayedReplay(
        make_mlp(0.5), (2, 2, 2), policy, 3, dropping_loss, still, seed=1, replicas=(2, 1, 1)
    )
    device = SingleDevice(make_mlp(0.5), 3, dropping_loss, still, seed=1)
    found = replay.train(data[:1]) + replay.train(data[1:])
    assert all(torch.equal(a, device.step(*one)) for a, one in zip(found, data, strict=True))


class Wide(nn.Module):
    stashes = ("wide",)

    def forward(self, value):
        return value.relu(), {"wide": value}


class Recall(nn.Module):
    recalls = ("wide",)

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 4)

    def forward(self, value, wide):
        return self.inner(value + wide)


def test_skips_cross_stages_and_stages_may_have_nothing_to_train():
    def build():
        torch.manual_seed(0)
        frozen = nn.Linear(16, 16)
        frozen.requires_grad_(False)
        return nn.Sequential(nn.Linear(16, 16), Wide(), nn.Tanh(), frozen, Recall())

    ours, theirs = build(), build()
    replay = DelayedReplay(ours, (1, 1, 1, 2), versions.Flush(), 2, F.cross_entropy, sgd)
    device = SingleDevice(theirs, 2, F.cross_entropy, sgd)
    for seed in range(2):
        replay.train([make_batch(5, seed=seed)])
        device.step(*make_batch(5, seed=seed))
    assert_same(ours, theirs)


def gradients_of(weights, model, inputs, targets):
    """Of the whole model, at some weights."""
    leaves = {name: one.clone().requires_grad_() for name, one in weights.items()}
    loss = F.cross_entropy(torch.func.functional_call(model, leaves, (inputs,)), targets)
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def delayed_descent(model, data, delay):
    """w(t+1) = w(t) − ν∇f_t(w(t−delay)), with w before 0 being w(0)."""
    history = [{name: one.detach().clone() for name, one in model.named_parameters()}]
    for t, (inputs, targets) in enumerate(data):
        gradient = gradients_of(history[max(0, t - delay)], model, inputs, targets)
        history.append({name: one - RATE * gradient[name] for name, one in history[-1].items()})
    return history[-1]


def assert_near(model, expected):
    found = {name: one.detach() for name, one in model.named_parameters()}
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("cuts", [(6,), (3, 3), (1, 2, 3)])
def test_double_buffering_is_descent_with_delay_one_for_the_whole_model(cuts):
    model = make_mlp(0.0, torch.float64)
    data = [make_batch(7, torch.float64, seed) for seed in range(5)]
    expected = delayed_descent(make_mlp(0.0, torch.float64), data, 1)
    DelayedReplay(model, cuts, versions.DoubleBuffer(), 3, F.cross_entropy, sgd).train(data)
    assert_near(model, expected)


@pytest.mark.parametrize("cuts", [(6,), (3, 3), (1, 2, 3), (1, 1, 1, 1, 2)])
def test_vertical_sync_is_descent_with_delay_p_minus_one_for_the_whole_model(cuts):
    model = make_mlp(0.0, torch.float64)
    data = [make_batch(6, torch.float64, seed) for seed in range(5)]
    parts = [(x, y) for one in data for x, y in zip(*(v.split(2) for v in one), strict=True)]
    expected = delayed_descent(make_mlp(0.0, torch.float64), parts, len(cuts) - 1)
    DelayedReplay(model, cuts, versions.VerticalSync(), 3, F.cross_entropy, sgd).train(data)
    assert_near(model, expected)


def test_stashing_in_one_stage_is_plain_descent_to_the_bit():
    ours, theirs = make_mlp(0.0), make_mlp(0.0)
    data = [make_batch(6, seed=seed) for seed in range(3)]
    DelayedReplay(ours, [6], versions.Stash(), 3, F.cross_entropy, sgd).train(data)
    optimizer = sgd(theirs.parameters())
    for inputs, targets in data:
        for x, y in zip(inputs.split(2), targets.split(2), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(theirs(x), y).backward()
            optimizer.step()
    assert_same(ours, theirs)


class Weights(nn.Module):
    """One weight for each of many independent quadratics."""

    def __init__(self, count):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(count, dtype=torch.float64))

    def forward(self, value):
        return value * self.weight


@pytest.mark.parametrize("tau", [0, 1, 2, 4, more(3), more(5), more(6)])
def test_a_quadratic_is_stable_up_to_the_bound_of_its_delay(tau):
    """αλ ≤ 2·sin(π/(4τ+2)), PipeMare, lemma 1; found to a thousandth with a fine grid of λ.

    At the bound, w turns by π/(2τ+1) per step, so over 4τ+2 steps its squares add up to the same.
    """
    period = 4 * tau + 2
    window, grid = 12 * period, torch.logspace(-0.8, 0.4, 6001, dtype=torch.float64)
    seen = []

    def loss(output, target):
        seen.append(output.detach()[0])
        return (grid * output**2).sum() / 2

    model = nn.Sequential(Weights(len(grid)), *(nn.Identity() for _ in range(tau)))
    policy = versions.PipeMare(updates="microbatch")
    one = torch.ones(3 * window, 1, dtype=torch.float64)
    replay = DelayedReplay(
        model, (1,) * (tau + 1), policy, len(one), loss, lambda p: torch.optim.SGD(p, lr=1.0)
    )
    replay.train([(one, one)])
    energy = [(torch.stack(seen[at : at + window]) ** 2).sum(0) for at in (window, 2 * window)]
    first_unstable = int((~(energy[1] <= energy[0])).nonzero()[0])
    assert grid[first_unstable].item() == pytest.approx(
        2 * math.sin(math.pi / (4 * tau + 2)), rel=1e-3
    )


POLICIES = [
    versions.Flush(),
    versions.Stash(),
    versions.Stash(updates="minibatch"),
    versions.Latest(),
    versions.Latest(updates="minibatch"),
    versions.VerticalSync(),
    versions.DoubleBuffer(),
    versions.PipeMare(),
    versions.PipeMare(updates="microbatch"),
    versions.Predict(),
    versions.Predict(rule="spectrain"),
]


def recorded(policy, replicas, m, count):
    """Reads of a stream on a chain of layers that are cheap."""
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in replicas))
    replay = DelayedReplay(
        model,
        (1,) * len(replicas),
        policy,
        m,
        half_square,
        lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        replicas=replicas,
    )
    rows = torch.zeros(count, 1)
    replay.train(zip(rows.split(m), rows.split(m), strict=True))
    return replay.reads


@settings(max_examples=30)
@given(
    st.sampled_from(POLICIES),
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
    st.integers(1, 4),
)
def test_delays_are_as_the_policy_says_in_the_steady_state(policy, replicas, per_replica):
    if isinstance(policy, versions.VerticalSync | versions.DoubleBuffer):
        replicas = [1] * len(replicas)
    m = per_replica * math.lcm(*replicas)
    warm = max((warm_up(replicas, s) + 1) * r for s, r in enumerate(replicas))
    begin = m * -(-warm // m) + m  # the first minibatch that is steady at every stage
    period = math.lcm(m, *replicas)
    reads = recorded(policy, replicas, m, begin + period)
    for s, count in enumerate(replicas):
        steady = [read for read in reads if read.stage == s and read.microbatch >= begin]
        per_update = 1.0 if policy.updates == "microbatch" else m / count
        place = versions.Place(s, len(replicas), warm_up(replicas, s), per_update)
        assert fmean(read.delay for read in steady) == pytest.approx(policy.delay(place))
        assert len(steady) == period


@settings(max_examples=50)
@given(
    st.sampled_from([policy for policy in POLICIES if policy.asynchronous]),
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
    st.integers(0, 3),
    st.integers(0, 14),
)
def test_a_real_order_of_ops_reads_the_same_versions(policy, replicas, extra, length):
    """Any length of stream; minibatches in which each replica has something to do."""
    m, count = max(replicas) + extra, max(replicas) + length
    schedule = families.build(
        "pipedream", num_ranks=sum(replicas), num_microbatches=count, replicas=replicas
    )
    per_minibatch = policy.updates == "minibatch"
    rounds = Rounds.of_minibatches(replicas, m, count) if per_minibatch else Rounds(tuple(replicas))
    reads = {(read.stage, read.microbatch): read for read in recorded(policy, replicas, m, count)}
    updates = {
        s: max(r.update for r in reads.values() if r.stage == s) for s, _ in enumerate(replicas)
    }
    for ops in add_updates(schedule, rounds).ranks:
        followed = versions.trace(ops, policy, rounds, len(replicas)).versions
        for op, version in zip(ops, followed, strict=True):
            if op.kind is Kind.FORWARD:
                assert reads[op.stage, op.microbatch].forward_version == version
            elif op.kind is Kind.BACKWARD:
                assert reads[op.stage, op.microbatch].backward_version == version
        assert (
            max(v for op, v in zip(ops, followed, strict=True) if op.kind is Kind.UPDATE)
            == (updates[ops[0].stage])
        )
