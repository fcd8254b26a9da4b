"""What NVIDIA's driver says of this machine's GPUs, which takes it less than a second."""

from __future__ import annotations

import os
import shutil
from typing import NamedTuple

_ANSWER_SECONDS = 10.0
_MIB = 2**20


class Gpu(NamedTuple):
    """What the driver says of one GPU."""

    number: str
    uuid: str
    memory_bytes: int


def gpus() -> list[Gpu]:
    """The GPUs that this process may use; none where NVIDIA's driver is not, or does not answer.

    ``CUDA_VISIBLE_DEVICES`` is obeyed; its numbers are taken in the order of ``nvidia-smi``, which
    is CUDA's under ``CUDA_DEVICE_ORDER=PCI_BUS_ID``.
    """
    program = shutil.which("nvidia-smi")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    # An answer takes the driver up to a second; who hides all GPUs need not wait for it.
    if program is None or visible == "":
        return []
    import subprocess  # takes long to load, for machines without GPUs

    query = ["--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            [program, *query], capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    there = [gpu for line in answer.stdout.splitlines() if (gpu := _gpu(line)) is not None]
    return there if visible is None else _chosen(there, visible)


def gpus_of(kind: str) -> list[Gpu]:
    """The same, if torch's accelerators of this kind are the driver's; else none."""
    return gpus() if kind == "cuda" else []


def _gpu(line: str) -> Gpu | None:
    """One line of the answer; ``None`` for a warning, or a device without a memory of its own."""
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != 3 or not cells[2].isdigit():
        return None
    return Gpu(cells[0], cells[1], int(cells[2]) * _MIB)


def _chosen(there: list[Gpu], visible: str) -> list[Gpu]:
    """As CUDA reads the list: what comes after the first name that means nothing is not seen."""
    chosen: list[Gpu] = []
    for name in (part.strip() for part in visible.split(",")):
        match = next(
            (gpu for gpu in there if name == gpu.number or (name and gpu.uuid.startswith(name))),
            None,
        )
        if match is None:
            break
        chosen.append(match)
    return chosen
