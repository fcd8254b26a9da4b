"""``route``: tokens travel to the copies that have their experts, and what these make of them back.

All-to-all is torch's, forward and backward. Sizes are exchanged first, since they depend on values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.base.errors import ModelError, RunError
from penstock.engine.model.experts import tokens_per_expert

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Experts, of (tokens, their experts, the weights of these): (n × width), twice (n × 1)."""


class ExpertCopies(Protocol):
    """The copies of a stage that together have all of its experts, as one of them reaches the
    others. Every copy calls the same methods in the same order.

    Attributes:
        size: how many there are.
        index: which one this is.
    """

    size: int
    index: int

    def exchange(
        self,
        output: Tensor,
        own: Tensor,
        output_sizes: Sequence[int] | None = None,
        own_sizes: Sequence[int] | None = None,
    ) -> None:
        """Give the next ``own_sizes`` rows of ``own`` to each copy, and take ``output_sizes`` rows
        from each; by default as many to and from all."""

    def add(self, numbers: Tensor) -> None:
        """Make each number the sum of those of all copies."""

    def take_first(self, values: Tensor) -> None:
        """Overwrite values with those of the first copy."""

    def close(self, *, failed: bool) -> None:
        """Nothing is asked any more. If this copy has failed, others that wait for it learn so."""


class _AllToAll(torch.autograd.Function):
    """Rows of some values to other copies; their gradients come back the same way, one value after
    the other."""

    @staticmethod
    def forward(
        ctx: Any,
        copies: ExpertCopies,
        sent: list[int],
        received: list[int],
        *values: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.copies, ctx.sent, ctx.received = copies, sent, received
        return tuple(_exchanged(copies, value, sent, received) for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        wanted = ctx.needs_input_grad[3:]
        back = (
            _exchanged(ctx.copies, gradient, ctx.received, ctx.sent) if wants else None
            for gradient, wants in zip(gradients, wanted, strict=True)
        )
        return None, None, None, *back


def _exchanged(copies: ExpertCopies, value: Tensor, sent: list[int], received: list[int]) -> Tensor:
    output = value.new_empty(sum(received), *value.shape[1:])
    copies.exchange(output, value.contiguous(), received, sent)
    return output


def _arriving(copies: ExpertCopies, number: int, counts: Tensor) -> Tensor:
    """How many tokens come from each copy to each expert that is here, one copy's after another's.

    Args:
        counts: how many go from here to each expert.
    """
    parts = counts.view(copies.size, -1)
    sent = torch.cat([parts, parts.new_full((copies.size, 1), number)], 1)
    received = torch.empty_like(sent)
    copies.exchange(received, sent)
    if bool((received[:, -1] != number).any()):
        raise RunError(
            "copies of a stage are at different mixtures of experts in the same op, and would take "
            "each other's tokens for their own; where layers are left out in some microbatches, "
            "take expert_ranks=1"
        )
    return received[:, :-1].reshape(-1)


def route(
    copies: ExpertCopies,
    number: int,
    num_experts: int,
    compute: Compute,
    idle: Compute,
    tokens: Tensor,
    expert_index: Tensor,
    expert_weights: Tensor,
) -> Tensor:
    """The sum, for each token, of what its experts make of it, wherever they are.

    Args:
        number: that of the mixture, alike on all copies.
        num_experts: of all copies together, of which each has as many.
        compute: the experts that are here, numbered from 0.
        idle: the same where no token has come.
        tokens: this copy's (tokens × width).
        expert_index, expert_weights: (tokens × choices); a choice of ``num_experts`` or more is
            dropped.

    Returns:
        (tokens × width).

    Raises:
        ModelError: experts give something else than a row as wide as each token.
        RunError: another copy is at another mixture.
    """
    choices = expert_index.shape[-1]
    chosen = expert_index.reshape(-1)
    counts = tokens_per_expert(chosen, num_experts)
    order = torch.argsort(chosen, stable=True)[: int(counts.sum())]
    arriving = _arriving(copies, number, counts)
    sent, received = (own.view(copies.size, -1).sum(1).tolist() for own in (counts, arriving))
    whose = torch.div(order, choices, rounding_mode="floor")
    here, weights = _AllToAll.apply(  # type: ignore[no-untyped-call]
        copies, sent, received, tokens[whose], expert_weights.reshape(-1)[order].unsqueeze(1)
    )
    num_here = num_experts // copies.size
    numbers = torch.arange(num_here, device=chosen.device).repeat(copies.size)
    numbers = torch.repeat_interleave(numbers, arriving).unsqueeze(1)
    made = (compute if len(here) else idle)(here, numbers, weights)
    if made.shape != here.shape:
        raise ModelError(
            f"experts made a value of shape {tuple(made.shape)} of tokens of shape "
            f"{tuple(here.shape)}; where copies divide experts, these give a row of the same width "
            "for each token"
        )
    (back,) = _AllToAll.apply(copies, received, sent, made.to(tokens.dtype))  # type: ignore[no-untyped-call]
    return torch.zeros_like(tokens).index_add(0, whose, back)
