"""Which device each rank computes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from penstock.base.errors import InputError
from penstock.base.values import shown
from penstock.engine.device.accelerators import accelerator_kind, accelerators

_EXAMPLE = "give one per rank, as in devices=['cuda:0', 'cuda:1'], or devices='cpu' for all"

Devices = str | torch.device | Sequence[str | int | torch.device]
"""A device for all ranks, or one for each; a number is the accelerator of that number."""


def devices_of_ranks(
    given: Devices | None, on_accelerator: Sequence[bool], ranks: Sequence[int], first: int = 0
) -> dict[int, torch.device]:
    """The devices of some ranks, those of accelerators with their index.

    Args:
        given: what the caller asks for; ``None`` follows the plan.
        on_accelerator: for each rank of the plan, or each tensor rank of each, whether it was made
            for an accelerator there.
        ranks: those of this process.
        first: the number of the accelerator that this process takes first.

    Raises:
        InputError: there is no such device here, or not one for each rank.
    """
    num_ranks = len(on_accelerator)
    if given is None:
        return _planned(on_accelerator, ranks, first)
    if isinstance(given, str | torch.device):
        return dict.fromkeys(ranks, _device(given))
    if not isinstance(given, Sequence) or len(given) != num_ranks:
        many = f"{len(given)} devices" if isinstance(given, Sequence) else shown(given)
        plural = "s" * (num_ranks > 1)
        raise InputError(f"devices: {many} for a plan of {num_ranks} rank{plural}; {_EXAMPLE}")
    return {rank: _device(given[rank]) for rank in ranks}


HOST = torch.device("cpu")
"""Where ranks compute that have no accelerator."""


def _planned(
    on_accelerator: Sequence[bool], ranks: Sequence[int], first: int
) -> dict[int, torch.device]:
    here, wanted = accelerators(), [rank for rank in ranks if on_accelerator[rank]]
    needed = first + len(wanted) if wanted else 0
    if len(here) < needed:
        have = f"{len(here)} ({here[0].type})" if here else "none that torch knows of"
        raise InputError(
            f"the plan is for accelerators: {needed} are needed for the ranks of this process, but "
            f"this machine has {have}; give devices='cpu' to train on the CPU all the same, plan "
            "for cores, as in Cluster.local(2), or let ranks share a device, as in "
            "devices=['cuda:0', 'cuda:0']"
        )
    places = dict.fromkeys(ranks, HOST)
    return places | dict(zip(wanted, here[first:], strict=False))


def _device(given: Any) -> torch.device:
    kind = accelerator_kind()
    try:
        number = isinstance(given, int) and not isinstance(given, bool)
        device = torch.device(kind or "cuda", given) if number else torch.device(given)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"devices: {shown(given)} is no device of torch; {_EXAMPLE}") from error
    if device.type == "cpu":
        return HOST
    here = accelerators()
    device = torch.device(device.type, device.index or 0)
    if device not in here:
        names = ", ".join(map(str, here)) or "none but the CPU"
        raise InputError(f"devices: {shown(str(device))} is not here; there are: {names}")
    return device
