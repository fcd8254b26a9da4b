"""Autocast, where several threads of a process use it.

Autocast remembers the copies of weights that it has made: in one place for the whole process, all
of which any thread forgets that leaves autocast. A weight that a forward uses several times, as
those of recurrent layers are, would then be copied anew in the middle of it, and its gradients be
summed in another order. So in a process, forwards under autocast take turns.

Where ranks wait for each other within a forward, as the members of a group do, they cannot take
turns. They remember no casts instead: a weight that is used twice is cast twice.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext

import torch

from penstock.engine.device.accelerators import device_kinds

_TURN = threading.RLock()  # a backward under autocast may run forwards again


def autocast_here() -> dict[str, torch.dtype]:
    """Device types for which this thread has autocast on, and the dtype of each."""
    return {
        device: torch.get_autocast_dtype(device)
        for device in device_kinds()
        if torch.is_autocast_enabled(device)
    }


@contextmanager
def remembering_no_casts() -> Iterator[None]:
    """A context in which this thread's forwards under autocast take no turns."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextmanager
def autocasting(dtypes: Mapping[str, torch.dtype]) -> Iterator[None]:
    """A context with autocast on for some device types and off for all others. Only where it is on
    does one wait for a turn, and weights are cast anew.

    Args:
        dtypes: by device type, what to cast to.
    """
    here = autocast_here()
    if not dtypes and not here:
        yield
        return
    # Within another region, switching off and back again forgets nothing: that needs no turn.
    takes_turns = dtypes and torch.is_autocast_cache_enabled()
    with _TURN if takes_turns else nullcontext(), ExitStack() as stack:
        for device in here.keys() - dtypes.keys():
            stack.enter_context(torch.autocast(device, enabled=False))
        for device, dtype in dtypes.items():
            stack.enter_context(torch.autocast(device, dtype))
        if dtypes:
            # Within the caller's region, which may last for many updates, nothing would be
            # forgotten, and forwards would go on with casts of old weights.
            torch.clear_autocast_cache()
            stack.callback(torch.clear_autocast_cache)
        yield
