"""Tells how much memory each accelerator of this machine has: a program for those who do not import
torch themselves, ``python -m penstock.engine.device.listing``."""

from __future__ import annotations

import sys

from penstock.engine.device.accelerators import accelerators
from penstock.engine.device.memory import total_bytes


def device_memories() -> list[int]:
    """The bytes of memory of each accelerator that torch knows here; 0 where it cannot tell."""
    return [total_bytes(device) for device in accelerators()]


if __name__ == "__main__":
    sys.stdout.write(" ".join(map(str, device_memories())) + "\n")
