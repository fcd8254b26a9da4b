"""How long kernels and collectives take on hardware of the catalogue.

``kernels`` turns flops and bytes into seconds, ``collectives`` messages over a topology. Both know
nothing of torch, and nothing else of Penstock knows how fast a device computes.
"""

from penstock.core.pricing.collectives import (
    CollectiveRing,
    all_reduce_seconds,
    gather_seconds,
    hop_seconds,
)
from penstock.core.pricing.kernels import (
    Kernel,
    KernelKind,
    KernelPace,
    at_the_pace,
    dispatch_seconds,
    kernel_seconds,
    seconds_of_each,
)

__all__ = [
    "CollectiveRing",
    "Kernel",
    "KernelKind",
    "KernelPace",
    "all_reduce_seconds",
    "at_the_pace",
    "dispatch_seconds",
    "gather_seconds",
    "hop_seconds",
    "kernel_seconds",
    "seconds_of_each",
]
