"""``check_apart``: whether experts make the same of tokens on several copies as on one device.

Copies give experts the tokens of several microbatches, each token as often as it has chosen one of
the experts that are here. Code that counts its tokens, takes a mean over them, makes the weights of
a token sum to 1 or draws would then compute something else without a word. So it is tried once, on
random tokens and weights, before anything is divided.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.base.errors import ModelError
from penstock.engine.experts.twins import twin_of
from penstock.engine.model.experts import FoundExperts
from penstock.engine.model.randomness import RandomStream

_NUM_TOKENS = 64  # of each of two microbatches; enough that capacities overflow
_BUSY_SHARE = 0.75  # of tokens whose first choice is expert 0, more than any capacity is meant for
_CHOICES = (2, 1)  # of each token; some code takes one only
_SEED = 0
_PLAIN = int | float | str


class _Batch(NamedTuple):
    """Tokens of one microbatch and their routes, as experts take them."""

    tokens: Tensor
    chosen: Tensor
    weights: Tensor


class _Probe:
    """A mixture with random weights: those of the model may be zeros, or not there yet."""

    def __init__(self, mixture: FoundExperts) -> None:
        self._mixture = mixture
        self._generator = torch.Generator().manual_seed(_SEED)
        self._weights = {id(own): self._random(own) for own in mixture.module.parameters()}
        self._forward: Callable[..., Any] = type(mixture.module).forward
        self.dtype = next(mixture.module.parameters()).dtype

    def _random(self, weight: Tensor) -> nn.Parameter:
        bound = weight.shape[-1] ** -0.5 if weight.dim() > 1 else 0.5
        values = torch.zeros(weight.shape, dtype=weight.dtype)
        if weight.is_floating_point():
            values.uniform_(-bound, bound, generator=self._generator)
        return nn.Parameter(values, requires_grad=False)

    def widths(self) -> Collection[int]:
        """How wide tokens may be: sizes of weights, each once."""
        first = 0 if self._mixture.is_list else 1
        sizes = (size for own in self._mixture.module.parameters() for size in own.shape[first:])
        return dict.fromkeys(sizes)

    def batch(self, width: int, choices: int, mean: float) -> _Batch:
        """Tokens of which most choose expert 0 first; those of microbatches differ in what they are
        on average."""
        num, made = self._mixture.num_experts, self._generator
        firsts = torch.randint(num, (_NUM_TOKENS,), generator=made)
        firsts[torch.rand(_NUM_TOKENS, generator=made) < _BUSY_SHARE] = 0
        steps = torch.randint(1, num, (_NUM_TOKENS,), generator=made)
        return _Batch(
            (mean + torch.randn(_NUM_TOKENS, width, generator=made)).to(self.dtype),
            torch.stack([firsts, (firsts + steps) % num], 1)[:, :choices],
            (0.2 + 0.8 * torch.rand(_NUM_TOKENS, choices, generator=made)).to(self.dtype),
        )

    def whole(self, batch: _Batch) -> Tensor:
        """All experts, of one microbatch.

        Raises:
            ValueError: it makes something of another shape, or passes over all choices but one.
        """
        twin = twin_of(self._mixture, self._weights, range(self._mixture.num_experts)).train()
        made = self._checked(self._forward(twin, *batch), batch.tokens)
        if batch.chosen.shape[1] > 1:
            firsts = batch.chosen[:, :1].expand_as(batch.chosen).contiguous()
            if self._forward(twin, batch.tokens, firsts, batch.weights).equal(made):
                raise ValueError("second choices do not count")
        return made

    def divided(self, batches: list[_Batch], num_ranks: int) -> Tensor:
        """What so many copies make of the tokens of all microbatches, of which each comes as often
        as it has chosen one of their experts, in another order."""
        tokens, index, weights = (torch.cat(own) for own in zip(*batches, strict=True))
        here = self._mixture.num_experts // num_ranks
        output = torch.zeros_like(tokens)
        order = torch.randperm(index.numel(), generator=self._generator)
        for first in range(0, self._mixture.num_experts, here):
            chosen = index.reshape(-1)[order] - first
            pairs = order[(chosen >= 0) & (chosen < here)]
            if not len(pairs):
                continue
            whose = torch.div(pairs, index.shape[1], rounding_mode="floor")
            numbers = index.reshape(-1)[pairs].unsqueeze(1) - first
            own = _Batch(tokens[whose], numbers, weights.reshape(-1)[pairs].unsqueeze(1))
            twin = twin_of(self._mixture, self._rows(first, here), range(first, first + here))
            made = self._checked(self._forward(twin.train(), *own), own.tokens)
            output.index_add_(0, whose, made)
        return output

    def _rows(self, first: int, count: int) -> dict[int, nn.Parameter]:
        if self._mixture.is_list:
            return self._weights
        return {
            key: nn.Parameter(own[first : first + count], requires_grad=False)
            for key, own in self._weights.items()
        }

    @staticmethod
    def _checked(made: Tensor, tokens: Tensor) -> Tensor:
        if made.shape != tokens.shape:
            raise ValueError(f"shape {tuple(made.shape)} of tokens of {tuple(tokens.shape)}")
        return made.to(tokens.dtype)


def check_apart(mixtures: Sequence[FoundExperts], num_ranks: int) -> None:
    """Raise ``ModelError`` if so many copies that divide experts would compute something else than
    one device. Modules are left as they are, and so are random numbers; one at a time is there a
    second time meanwhile. What cannot be run on random tokens, as its weights do not say how wide
    these are, is not looked at.
    """
    for mixture in _unlike(mixtures):
        if next(mixture.module.parameters()).is_floating_point():
            _check_one(mixture, num_ranks)


def _unlike(mixtures: Sequence[FoundExperts]) -> list[FoundExperts]:
    """The first of all that have the same code, shapes and settings."""
    firsts: dict[str, FoundExperts] = {}
    for own in mixtures:
        settings = [
            (type(module), [(k, v) for k, v in vars(module).items() if isinstance(v, _PLAIN)])
            for module in own.module.modules()
        ]
        shapes = [(weight.shape, weight.dtype) for weight in own.module.parameters()]
        firsts.setdefault(repr((settings, shapes)), own)
    return list(firsts.values())


def _check_one(mixture: FoundExperts, num_ranks: int) -> None:
    probe = _Probe(mixture)
    name = f"{mixture.path!r} ({type(mixture.module).__name__})"
    with torch.no_grad(), RandomStream(_SEED) as stream:
        for width, choices in itertools.product(probe.widths(), _CHOICES):
            batches = [probe.batch(width, choices, mean) for mean in (-1.0, 2.0)]
            try:
                wanted = torch.cat([probe.whole(batch) for batch in batches])
            except Exception:  # tokens of another width, or what training will say itself
                continue
            if stream.drew:
                raise ModelError(draws_inside(name))
            try:
                made = probe.divided(batches, num_ranks)
            except Exception as error:
                few = mixture.num_experts // num_ranks
                raise ModelError(
                    f"{name} runs with all its {mixture.num_experts} experts, and fails with {few} "
                    f"of them ({type(error).__name__}: {error}). Let its code read how many "
                    "there are from self.num_experts, or len(self) of a list, and take tokens with "
                    "one choice each; or take expert_ranks=1"
                ) from error
            _check_alike(name, wanted, made)
            return


def draws_inside(name: str) -> str:
    """Why experts must not draw."""
    return (
        f"{name} drops out features, or draws otherwise, inside experts, whose tokens are "
        "elsewhere than on one device, so that others would be dropped; put the dropout behind the "
        "experts, or take expert_ranks=1"
    )


def _check_alike(name: str, wanted: Tensor, made: Tensor) -> None:
    tolerance = torch.finfo(wanted.dtype).eps ** 0.5 * wanted.abs().max()
    if bool((made - wanted).abs().max() > tolerance):
        raise ModelError(
            f"{name} treats tokens together, as a capacity or a mean over them does: beside tokens "
            "of other microbatches, or choice by choice, it makes something else of them than on "
            "one device; use within_capacity in the router (docs/expert-parallelism.md), let each "
            "choice of a token count for itself, or take expert_ranks=1"
        )
