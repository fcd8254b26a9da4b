"""What ``torch.get_device_module("emu")`` gives: what torch's modules of other devices have."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from tests.kit.accelerator import building

NAME = "emu"
NUM_DEVICES = 4
_PRIVATE_USE_1 = 20  # torch's number for the kind of device that others may add


_ledger = functools.cache(building.load)


def _index(device=None) -> int:
    """A device's number; it is given as a number, a name, a ``torch.device`` or not at all."""
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    device = torch.device(device)
    if device.type != NAME:
        raise ValueError(f"{device} is no emulated device")
    return current_device() if device.index is None else device.index


# --- devices and streams

_initialized = True  # torch's checkpoints save random states only of a module that says so


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return _ledger().is_forked_after_use()


def device_count() -> int:
    return NUM_DEVICES


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device) -> None:
    torch.accelerator.set_device_index(_index(device))


class device(torch.accelerator.device_index):
    """Makes a device the current one of this thread, inside a ``with``."""

    def __init__(self, device=None):
        super().__init__(_index(device))


def current_stream(device=None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def default_stream(device=None) -> torch.Stream:
    index = _index(device)
    return torch.Stream(stream_id=0, device_index=index, device_type=_PRIVATE_USE_1)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


def stream(stream: torch.Stream) -> torch.Stream:
    """A ``with`` under which ops go to this stream: a stream is that by itself."""
    return stream


def synchronize(device=None) -> None:
    torch.accelerator.synchronize(_index(device))


def Stream(device=None) -> torch.Stream:
    return torch.Stream(torch.device(NAME, _index(device)))


def Event(**options) -> torch.Event:
    return torch.Event(NAME, **options)


# --- random numbers


def _generator(device=None) -> torch.Generator:
    return _ledger().default_generator(_index(device))


def manual_seed(seed: int) -> None:
    _generator().manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(NUM_DEVICES):
        _generator(index).manual_seed(seed)


def initial_seed() -> int:
    return _generator().initial_seed()


def get_rng_state(device=None) -> torch.Tensor:
    return _generator(device).get_state()


def set_rng_state(state: torch.Tensor, device=None) -> None:
    _generator(device).set_state(state)


# --- memory


def memory_allocated(device=None) -> int:
    return torch.accelerator.memory_allocated(_index(device))


def max_memory_allocated(device=None) -> int:
    return torch.accelerator.max_memory_allocated(_index(device))


def reset_peak_memory_stats(device=None) -> None:
    torch.accelerator.reset_peak_memory_stats(_index(device))


def mem_get_info(device=None) -> tuple[int, int]:
    return torch.accelerator.get_memory_info(_index(device))


def empty_cache() -> None:
    torch.accelerator.empty_cache()


def set_memory_limit(num_bytes: int, device=None) -> None:
    """Gives a device this much memory; what is allocated beyond raises ``OutOfMemoryError``."""
    _ledger().set_memory_limit(_index(device), num_bytes)


# --- when the host waits


def host_reads(device=None) -> int:
    """How often the host waited for a device since it needed a value, or handed one over."""
    return _ledger().host_reads(_index(device))


def host_waits(device=None) -> int:
    """How often the host asked to wait: for an event, a stream or the device."""
    return _ledger().host_waits(_index(device))


def reset_host_counts(device=None) -> None:
    _ledger().reset_host_counts(_index(device))


def set_sync_debug_mode(mode: str) -> None:
    """Under "error", what ``host_reads`` counts raises instead; "default" allows it again."""
    if mode not in {"default", "error"}:
        raise ValueError(f'the mode is "default" or "error", not {mode!r}')
    _ledger().refuse_host_reads(mode == "error")


# --- how long it would have taken


class Worked(NamedTuple):
    """A stream, in seconds since the pace was set: when it began and ended, and how long it was
    busy."""

    begin: float
    end: float
    busy: float


def set_pace(launch_seconds: float, kernel_seconds: float) -> None:
    """From now on, each op that computes takes the host and its stream so long, in a time that is
    counted and not waited for; 0 and 0 count nothing."""
    _ledger().set_pace(launch_seconds, kernel_seconds)


def worked(device=None) -> list[Worked]:
    """What each stream of a device has done at this pace, of those that have done something."""
    return [Worked(*stream) for stream in _ledger().worked(_index(device))]


def host_idle(device=None) -> float:
    """How long threads whose device it is stood still at this pace: for a value, for work that they
    asked to wait for, or for another thread to launch what they need."""
    return _ledger().host_idle(_index(device))


def check() -> None:
    """Lets the host wait for all devices, which raises what copies of pinned memory found wrong."""
    for index in range(NUM_DEVICES):
        _ledger().complete(index)


# --- autocast


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def is_bf16_supported() -> bool:
    return True
