"""What all ranks must agree on before an update: the global norm, and whether all is finite.

The norm is computed as ``torch.nn.utils.clip_grad_norm_`` does on one device: the norm of the
parameters' norms in the model's order. Every rank tells the norms of its parameters and computes
the same total, so it is equal to the bit however the model is spread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.transport import Edge, Transport
from penstock.transport.tags import AGREEMENT_TAG


class Share(NamedTuple):
    """What one rank knows.

    Attributes:
        norms: by the parameter's place in the model.
        finite: whether all its gradients are finite.
    """

    norms: dict[int, Tensor]
    finite: bool

    @classmethod
    def of(cls, parameters: Mapping[int, nn.Parameter]) -> Share:
        """The share of some parameters' gradients."""
        gradients = {
            place: parameter.grad
            for place, parameter in parameters.items()
            if parameter.grad is not None
        }
        norms = {place: torch.linalg.vector_norm(gradient) for place, gradient in gradients.items()}
        finite = not norms or bool(torch.stack([*norms.values()]).isfinite().all())
        if not finite:
            # A norm may overflow though none of its numbers has.
            finite = all(bool(gradient.isfinite().all()) for gradient in gradients.values())
        return cls(norms, finite)


class Verdict(NamedTuple):
    """What follows from all shares.

    Attributes:
        norm: that of all gradients together.
        finite: whether all of them are.
        factor: what clipping multiplies them by; 1 where it changes nothing.
    """

    norm: Tensor
    finite: bool
    factor: float

    @classmethod
    def of(cls, shares: Iterable[Share], clip_norm: float | None) -> Verdict:
        """The verdict that every rank reaches by itself."""
        norms: dict[int, Tensor] = {}
        finite = True
        for share in shares:
            norms |= share.norms
            finite = finite and share.finite
        ordered = [norms[place] for place in sorted(norms)]
        norm = torch.linalg.vector_norm(torch.stack(ordered)) if ordered else torch.tensor(0.0)
        factor = 1.0
        if clip_norm is not None:
            factor = float(torch.clamp(clip_norm / (norm + 1e-6), max=1.0))
        return cls(norm, finite, factor)


def tell(transport: Transport, rank: int, num_ranks: int, number: int, share: Share) -> None:
    """Send this rank's share to all others."""
    for other in range(num_ranks):
        if other != rank:
            transport.send(Edge(rank, other, AGREEMENT_TAG), number, tuple(share))


def hear(
    transport: Transport, rank: int, num_ranks: int, number: int, own: Share
) -> Sequence[Share]:
    """Wait for the shares of all others; with this rank's, in the order of the ranks."""
    return [
        own
        if other == rank
        else Share(
            *transport.recv(
                Edge(other, rank, AGREEMENT_TAG),
                number,
                f"rank {rank}, waiting before its update for the norm of rank {other}'s gradients",
            )
        )
        for other in range(num_ranks)
    ]
