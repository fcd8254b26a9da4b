"""Models of one weight per layer, whose training can be written down with numbers."""

from __future__ import annotations

import math
from statistics import fmean

import pytest
import torch
from torch import nn

from penstock.trial.reference.delayed_replay import DelayedReplay

RATE = 0.3
NUMBERS = 11
WEIGHTS = (0.9, -0.7, 1.1)
XS = (0.5, -1.2, 0.8, 1.5, -0.3, 0.7, -0.9, 1.1, 0.4, -0.6, 1.3)
YS = (0.1, 0.4, -0.2, 0.3, 0.6, -0.5, 0.2, -0.1, 0.7, 0.0, -0.4)


def make_chain(p):
    """w ↦ tanh(w·x), p times; a stage is a Linear and a Tanh."""
    model = nn.Sequential()
    for weight in WEIGHTS[:p]:
        linear = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.constant_(linear.weight, weight)
        model.extend([linear, nn.Tanh()])
    return model


def half_square(output, target):
    return ((output - target) ** 2 / 2).mean()


def batches(m, count=NUMBERS):
    """The first numbers, m in each minibatch."""
    xs, ys = (torch.tensor(v[:count], dtype=torch.float64).unsqueeze(1) for v in (XS, YS))
    return list(zip(xs.split(m), ys.split(m), strict=True))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=RATE)


def trained(policy, p, *streams, m=1, optimizer=sgd, **options):
    """The weights of a chain after some streams."""
    model = make_chain(p)
    replay = DelayedReplay(model, (2,) * p, policy, m, half_square, optimizer, **options)
    for stream in streams:
        replay.train(stream)
    return [weight.item() for weight in model.parameters()]


def pass_through(reads, backs, x, y):
    """Gradients of half a square with these weights in the forward and those in the backward."""
    values = [x]
    for weight in reads:
        values.append(math.tanh(weight * values[-1]))
    gradients, back = [], values[-1] - y
    for s in reversed(range(len(reads))):
        back *= 1 - values[s + 1] ** 2
        gradients.insert(0, back * values[s])
        back *= backs[s]
    return gradients


def recurrence(p, m, forward, backward, count=NUMBERS, rate=lambda s, n: RATE):
    """Weights after a stream of one-row microbatches, m of them per update, at rate(s, n)."""
    history = [[weight] for weight in WEIGHTS[:p]]
    held = []
    for k in range(count):
        reads = [history[s][forward(s, k)] for s in range(p)]
        backs = [history[s][backward(s, k)] for s in range(p)]
        held.append(pass_through(reads, backs, XS[k], YS[k]))
        if len(held) == m or k == count - 1:
            for s in range(p):
                step = rate(s, len(history[s]) - 1) * fmean(one[s] for one in held)
                history[s].append(history[s][-1] - step)
            held = []
    return [one[-1] for one in history]


def close(numbers):
    return pytest.approx(numbers, rel=1e-11)
