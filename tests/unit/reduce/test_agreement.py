"""The verdict on the gradients of all ranks: that of torch on one device, however spread."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from penstock.engine.reduce import agreement
from penstock.engine.reduce.agreement import Share, Verdict, unscale
from penstock.engine.run.recipe import LossScale


def parameters(gradients):
    found = []
    for gradient in gradients:
        parameter = nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient.clone()
        found.append(parameter)
    return found


def verdict_of(found, ranks, clip_norm, inverse=1.0):
    """With parameter k on rank ``ranks[k]``."""
    shares = []
    for rank in range(4):
        own = {place: one for place, one in enumerate(found) if ranks[place] == rank}
        gradients = [one.grad for one in own.values() if one.grad is not None]
        shares.append(Share.of(own, unscale(gradients, inverse)))
    return Verdict.of(shares, clip_norm)


@given(
    ranks=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    seed=st.integers(0, 2**30),
    clip_norm=st.floats(1e-3, 1e3),
)
def test_the_norm_and_the_factor_are_those_of_torch_to_the_bit(ranks, seed, clip_norm):
    generator = torch.Generator().manual_seed(seed)
    found = parameters(torch.randn(3 + k, 7, generator=generator) for k in range(len(ranks)))
    verdict = verdict_of(found, ranks, clip_norm)
    scaled = [one.grad * verdict.factor for one in found]
    norm = torch.nn.utils.clip_grad_norm_(found, clip_norm)
    assert torch.equal(verdict.norm, norm)
    assert verdict.finite
    assert all(torch.equal(mine, one.grad) for mine, one in zip(scaled, found, strict=True))


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("rank", range(4))
def test_one_number_that_is_not_finite_decides_for_all(bad, rank):
    gradients = [torch.ones(3) for _ in range(4)]
    gradients[rank][1] = bad
    assert not verdict_of(parameters(gradients), range(4), None).finite


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_are_unscaled_as_torch_does_it(dtype):
    generator = torch.Generator().manual_seed(0)
    found = parameters(torch.randn(5, 7, generator=generator, dtype=dtype) for _ in range(3))
    scaler = torch.amp.GradScaler("cpu", init_scale=3.0)
    scaler.scale(torch.ones(()))
    optimizer = torch.optim.SGD(found)
    ours = [one.grad.clone() for one in found]
    scaler.unscale_(optimizer)
    overflow = unscale(ours, LossScale.of(scaler).inverse)
    assert not overflow
    assert Verdict.of([Share.of(dict(enumerate(found)), overflow)], 1.0).finite
    assert all(torch.equal(mine, one.grad) for mine, one in zip(ours, found, strict=True))


def test_a_norm_that_overflows_is_not_an_infinite_gradient():
    verdict = verdict_of(parameters([torch.full((3,), 1e30)]), [2], 1.0)
    assert verdict.norm.isinf()
    assert verdict.finite
    assert verdict.factor == 0.0


def test_without_any_gradient_the_norm_is_zero():
    assert verdict_of([nn.Parameter(torch.ones(2))], [0], 1.0) == (torch.tensor(0.0), True, 1.0)


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("clip_norm", [None, 2.5, 100.0])
@pytest.mark.parametrize("overflows", [(None, None), (0.0, None), (0.0, 1.0), (1.0, 0.0)])
def test_a_verdict_is_the_same_wherever_the_norms_lie(on_host, clip_norm, overflows, monkeypatch):
    """On an accelerator the factor stays there, and the host learns no more than it must."""
    monkeypatch.setattr(agreement, "is_on_host", lambda device: on_host)
    shares = [
        Share({place: torch.tensor(norm)}, None if overflow is None else torch.tensor(overflow))
        for place, (norm, overflow) in enumerate(zip((3.0, 4.0), overflows, strict=True))
    ]
    verdict = Verdict.of(shares, clip_norm)
    assert verdict.norm == 5.0
    assert verdict.finite == (1.0 not in overflows)
    factor = 1.0 if clip_norm is None else min(clip_norm / 5.0, 1.0)
    assert float(verdict.factor) == pytest.approx(factor)
    assert isinstance(verdict.factor, torch.Tensor) == (clip_norm is not None and not on_host)
