"""The accelerators of this process, whichever kind they are, and which of them each rank takes.

Only ``torch.accelerator`` and the module that torch has for a kind of device are asked, so
``cuda``, ``xpu``, ``npu`` and ``mps`` need no line of their own. So too for the backend of
``torch.distributed`` that moves tensors between accelerators of several processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from penstock.base.errors import InputError
from penstock.base.values import shown

# Of names that begin alike the longer one stands first.
_PEAK_FLOPS = (
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("V100", 125e12),
    ("T4", 65e12),
    ("MI300X", 1307e12),
)


@cache  # it is asked with every minibatch
def accelerator_kind() -> str | None:
    """The kind of this process's accelerators, for example ``"cuda"``; ``None`` without any."""
    if not torch.accelerator.is_available():
        return None
    accelerator = torch.accelerator.current_accelerator()
    return None if accelerator is None else accelerator.type


def accelerators() -> tuple[torch.device, ...]:
    """All accelerators of this process, in their order; empty without any."""
    kind = accelerator_kind()
    if kind is None:
        return ()
    return tuple(torch.device(kind, index) for index in range(torch.accelerator.device_count()))


def accelerator_name(device: torch.device) -> str:
    """The name of an accelerator, for people; its place where torch does not know."""
    name_of = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(device) if name_of is None else str(name_of(device))


def peak_flops(device: torch.device) -> float | None:
    """The floating-point operations per second of a device by its maker's sheet, in matrices of 16
    bits without sparsity; ``None`` where that is not known."""
    if is_on_host(device):
        return None
    name = accelerator_name(device)
    return next((peak for part, peak in _PEAK_FLOPS if part in name), None)


def device_kinds() -> tuple[str, ...]:
    """The kinds of device that tensors of this process may be on."""
    kind = accelerator_kind()
    return ("cpu",) if kind is None else ("cpu", kind)


@cache
def can_pin() -> bool:
    """Whether this process's kind of accelerator has pinned memory; without, copies are slower."""
    try:
        torch.empty(1, pin_memory=True)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def is_on_host(device: torch.device) -> bool:
    """Whether what happens there has happened when the call returns."""
    return device.type in ("cpu", "meta")


def generators_kept(devices: Iterable[torch.device]) -> AbstractContextManager[None]:
    """A context after which the CPU's default generator, and those of some devices, are in the
    state that they were in before."""
    kind = accelerator_kind() or "cuda"
    numbers = sorted({device.index or 0 for device in devices if device.type == kind})
    return torch.random.fork_rng(devices=numbers, device_type=kind)


@contextmanager
def lent_generator(generator: torch.Generator) -> Iterator[None]:
    """A context in which the default generator of a device is in the state of another one of the
    same device, which moves on instead of it."""
    device = generator.device
    default = torch if device.type == "cpu" else torch.get_device_module(device)
    which = () if device.type == "cpu" else (device,)
    before = default.get_rng_state(*which)
    default.set_rng_state(generator.get_state(), *which)
    try:
        yield
    finally:
        generator.set_state(default.get_rng_state(*which))
        default.set_rng_state(before, *which)


HOST_BACKEND = "gloo"
"""For tensors in main memory."""


def backend_of_accelerators() -> str | None:
    """The backend for this process's accelerators; ``None`` if it has none, or torch none for
    them."""
    kind = accelerator_kind()
    try:
        backend = None if kind is None else str(dist.get_default_backend_for_device(kind))
    except ValueError:  # nobody has registered one
        return None
    return backend if backend is not None and dist.is_backend_available(backend) else None


def is_of_accelerators(backend: str) -> bool:
    """Whether tensors that a backend moves lie on accelerators."""
    return backend == backend_of_accelerators() != HOST_BACKEND


def device_of(backend: str) -> torch.device:
    """Where tensors must lie for a backend: on this thread's current accelerator, or in main
    memory."""
    kind = accelerator_kind() if is_of_accelerators(backend) else None
    if kind is None:
        return torch.device("cpu")
    return torch.device(kind, torch.accelerator.current_device_index())


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
