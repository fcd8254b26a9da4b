"""Agreement of all ranks before an update: on the global norm, and whether all is finite.

The norm is computed as ``torch.nn.utils.clip_grad_norm_`` does on one device: the norm of the
parameters' norms in the model's order. Every rank tells the norms of its parameters and computes
the same total, so it is equal to the bit however the model is spread.

On an accelerator the host would have to wait for every number that it reads. To clip it reads none:
gradients are multiplied by a number that stays on the device. To decide whether to step it reads
what it needs at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.engine.device.accelerators import is_on_host
from penstock.engine.transport import Edge, Transport
from penstock.engine.transport.base import AGREEMENT_TAG


def unscale(gradients: Iterable[Tensor], inverse: float) -> Tensor | None:
    """Multiply gradients, which are on one device, by a number.

    Returns:
        Whether one of them was infinite or NaN before, as a number on their device: 0 if none was,
        else 1; ``None`` without gradients.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        by_dtype[gradient.dtype].append(gradient)
    overflow: Tensor | None = None
    for group in by_dtype.values():
        device = group[0].device
        if overflow is None:
            overflow = torch.zeros(1, dtype=torch.float32, device=device)
        factor = torch.full((1,), inverse, dtype=torch.float32, device=device)
        # What torch's own GradScaler calls: one pass over the gradients for both.
        torch._amp_foreach_non_finite_check_and_unscale_(group, overflow, factor)
    return overflow


class Share(NamedTuple):
    """One rank's part of what all must know.

    Attributes:
        norms: by the parameter's place in the model.
        overflow: what ``unscale`` says of its gradients; ``None`` if they were not scaled.
    """

    norms: dict[int, Tensor]
    overflow: Tensor | None = None

    @classmethod
    def of(cls, parameters: Mapping[int, nn.Parameter], overflow: Tensor | None = None) -> Share:
        """The share of some parameters' gradients."""
        norms = {
            place: torch.linalg.vector_norm(parameter.grad)
            for place, parameter in parameters.items()
            if parameter.grad is not None
        }
        return cls(norms, overflow)

    def with_that_of(self, other: Share) -> Share:
        """The share of these parameters and of others on the same rank."""
        return Share(self.norms | other.norms, _any([self.overflow, other.overflow]))


def _any(overflows: Iterable[Tensor | None]) -> Tensor | None:
    scaled = [overflow for overflow in overflows if overflow is not None]
    return reduce(torch.maximum, scaled) if scaled else None


class Verdict(NamedTuple):
    """The consequences of all shares.

    Attributes:
        norm: that of all gradients together.
        finite: whether all of them are; true if they were not scaled, when nobody asks.
        factor: what clipping multiplies gradients by; 1 where it changes nothing. A tensor where
            the host would have to wait for the number and needs it for nothing.
    """

    norm: Tensor
    finite: bool
    factor: float | Tensor

    @property
    def clips(self) -> bool:
        """Whether gradients are to be multiplied by the factor."""
        return isinstance(self.factor, Tensor) or self.factor != 1.0

    @classmethod
    def of(
        cls, shares: Iterable[Share], clip_norm: float | None, *, reads_factor: bool = False
    ) -> Verdict:
        """The verdict that every rank reaches by itself; the host waits for its device once or, if
        nothing was scaled, not at all.

        Args:
            shares: of all ranks, on this rank's device.
            reads_factor: whether the host must know the factor.
        """
        shares = [*shares]
        norms: dict[int, Tensor] = {}
        for share in shares:
            norms |= share.norms
        ordered = [norms[place] for place in sorted(norms)]
        norm = torch.linalg.vector_norm(torch.stack(ordered)) if ordered else torch.tensor(0.0)
        overflow = _any(share.overflow for share in shares)
        if clip_norm is None:
            return cls(norm, not any(_read(overflow)), 1.0)
        factor = torch.clamp(clip_norm / (norm + 1e-6), max=1.0)
        if not reads_factor and not is_on_host(norm.device):
            return cls(norm, not any(_read(overflow)), factor)
        read_factor, *infinite = _read(factor, overflow)
        return cls(norm, not any(infinite), read_factor)


def _read(*numbers: Tensor | None) -> list[float]:
    """Numbers that are on one device, without those that are ``None``; read at once.

    >>> _read(torch.tensor(0.5), None, torch.tensor([2.0]))
    [0.5, 2.0]
    """
    wanted = [number.reshape(1) for number in numbers if number is not None]
    read: list[float] = torch.cat(wanted).tolist() if wanted else []
    return read


def tell(transport: Transport, rank: int, num_ranks: int, number: int, share: Share) -> None:
    """Send this rank's share to all others."""
    norms = torch.stack([*share.norms.values()]) if share.norms else None
    message = tuple(share.norms), norms, share.overflow
    for other in range(num_ranks):
        if other != rank:
            transport.send(Edge(rank, other, AGREEMENT_TAG), number, message)


def hear(
    transport: Transport, rank: int, num_ranks: int, number: int, own: Share
) -> Sequence[Share]:
    """Wait for the shares of all others; with this rank's, in the order of the ranks."""
    return [
        own
        if other == rank
        else _read_share(
            *transport.recv(
                Edge(other, rank, AGREEMENT_TAG),
                number,
                f"rank {rank}, waiting before its update for the norm of rank {other}'s gradients",
            )
        )
        for other in range(num_ranks)
    ]


def _read_share(places: tuple[int, ...], norms: Tensor | None, overflow: Tensor | None) -> Share:
    values = () if norms is None else norms.unbind()
    return Share(dict(zip(places, values, strict=True)), overflow)
