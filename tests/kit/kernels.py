"""Which kernels torch finds on this CPU, or on the older one that it is told to be."""

from __future__ import annotations

import contextlib
from functools import cache

import torch
from torch import nn


@contextlib.contextmanager
def kernels_for_an_lstm():
    """A context in which an LSTM runs under autocast, also where an older CPU is played.

    torch asks the CPU itself whether it has instructions for bfloat16, and then leaves an LSTM to
    oneDNN, which obeys ``ONEDNN_MAX_CPU_ISA`` and may have none. On a CPU that is older in truth,
    torch takes its own kernel, as it does here without oneDNN.
    """
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = before and _one_dnn_has_it()
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before


@cache
def _one_dnn_has_it() -> bool:
    try:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), torch.random.fork_rng([]):
            nn.LSTM(1, 1)(torch.ones(1, 1, 1))
    except RuntimeError:
        return False
    return True
