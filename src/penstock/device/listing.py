"""Tells how much memory each accelerator of this machine has: a program for those who do not import
torch themselves, ``python -m penstock.device.listing``."""

from __future__ import annotations

import sys

from penstock.device.accelerators import accelerators
from penstock.device.memory import total_bytes

if __name__ == "__main__":
    memories = (total_bytes(device) for device in accelerators())
    sys.stdout.write(" ".join(map(str, memories)) + "\n")
