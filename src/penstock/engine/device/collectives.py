"""Which backend of ``torch.distributed`` moves tensors between accelerators of several processes,
and where they must lie for it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from penstock.engine.device.accelerators import accelerator_kind

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
