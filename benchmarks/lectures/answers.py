"""The parts of the page about the lectures' results."""

from __future__ import annotations

from benchmarks.lectures.gpipe import gpipe_table
from benchmarks.lectures.hydra import hydra
from benchmarks.lectures.pipedream import (
    faster_devices,
    gpipe_slowdowns,
    intra_batch,
    overheads,
    speed_ups,
)
from benchmarks.lectures.streams import streams
from benchmarks.lectures.sums import summation_servers
from benchmarks.lectures.transformers import two_buffers

PARTS = {
    "PipeDream: epoch time over data parallelism": speed_ups,
    "PipeDream against GPipe": gpipe_slowdowns,
    "PipeDream against model and hybrid parallelism": intra_batch,
    "What data parallelism costs": overheads,
    "Faster devices": faster_devices,
    "BytePS": summation_servers,
    "GPipe": gpipe_table,
    "PipeDream-2BW": two_buffers,
    "Hydra": hydra,
    "PARTIME": streams,
}
"""By their titles."""
