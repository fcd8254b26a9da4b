"""Parameters and gradients for tests of optimizers."""

from __future__ import annotations

import torch
from torch import nn


class Delayed(list):
    """What the engine's list of a stage's parameters tells."""

    def __init__(self, parameters, delay, num_stages):
        super().__init__(parameters)
        self.delay = delay
        self.num_stages = num_stages


def noise(*shape, seed, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def weights(*shapes, seed=0, dtype=torch.float64):
    return [nn.Parameter(noise(*s, seed=seed + i, dtype=dtype)) for i, s in enumerate(shapes)]


def give_gradients(parameters, seed):
    for place, parameter in enumerate(parameters):
        gradient = noise(*parameter.shape, seed=1000 * seed + place)
        parameter.grad = gradient.to(parameter.dtype)


def train(optimizer, num_steps, first=0):
    """Step on gradients that depend on nothing but the step's number."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number in range(first, first + num_steps):
        give_gradients(parameters, number)
        optimizer.step()
    return [parameter.detach().clone() for parameter in parameters]


def assert_same(first, second, **tolerance):
    torch.testing.assert_close(first, second, **(tolerance or {"rtol": 0, "atol": 0}))
