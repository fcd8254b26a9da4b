"""Where the ranks of a job under ``penstock run`` meet: memory that they have inherited.

torch's store for jobs listens on a port and asks nobody for a password, so every user of the host
could read there how ranks find each other, and write that one has failed. This one is a file
without a name. Only processes of the user who owns the job, and root, can open it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch.distributed as dist

from penstock.base.errors import RunError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

VARIABLE = "PENSTOCK_STORE"
"""``<process>:<descriptor>:<number of ranks>``: only the process itself is meant, not those that it
starts, which may be a job of their own."""


def empty_store() -> int:
    """A descriptor of the memory of a store, for processes that are forked from this one."""
    descriptor = os.memfd_create("penstock-store", os.MFD_CLOEXEC)
    os.fchmod(descriptor, 0o600)
    return descriptor


def told_to_rank(descriptor: int, num_ranks: int) -> str:
    """What this process, which has become a rank, finds in its environment."""
    return f"{os.getpid()}:{descriptor}:{num_ranks}"


def private_store(num_ranks: int) -> Store | None:
    """The store of this process's job, if that has as many ranks; ``None`` elsewhere than under
    ``penstock run``.

    Raises:
        RunError: it cannot be opened.
    """
    told = os.environ.get(VARIABLE, "").split(":")
    if told[0] != str(os.getpid()) or told[2] != str(num_ranks):
        return None
    path = f"/proc/self/fd/{told[1]}"
    try:
        os.stat(path)  # what cannot be opened, torch would try to open for minutes
    except OSError as error:
        raise RunError(
            f"the store of the job cannot be opened at {path} ({error.strerror}); penstock run "
            "needs /proc, and the descriptors that ranks inherit; else use torchrun"
        ) from None
    return dist.FileStore(path)  # type: ignore[attr-defined]
