"""How fast a disk is that stages are to come from: one file, written and read once."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress

from msgspec.structs import replace

from penstock.cluster.parts import Tier
from penstock.errors import FileError

_SAMPLE_BYTES = 64 << 20
_PIECE_BYTES = 8 << 20
_Move = Callable[[int, list[mmap.mmap], int], int]
_HOST_BYTES_PER_SECOND = 5e9
"""Of a copy within main memory, by one core: what a tier there is taken for."""


def measured(tier: Tier) -> Tier:
    """A tier with its speeds; those that are written down stay.

    Args:
        tier: of a disk, a sample is written to its folder and read back, past the page cache where
            the file system can; it takes a fraction of a second on a fast disk.

    Raises:
        FileError: nothing can be written there.
    """
    if tier.read_bytes_per_second and tier.write_bytes_per_second:
        return tier
    read = write = _HOST_BYTES_PER_SECOND
    if tier.kind == "disk":
        read, write = _disk(tier.folder or tempfile.gettempdir())
    return replace(
        tier,
        read_bytes_per_second=tier.read_bytes_per_second or read,
        write_bytes_per_second=tier.write_bytes_per_second or write,
    )


def _disk(folder: str) -> tuple[float, float]:
    try:
        file, name = tempfile.mkstemp(prefix=".penstock-", dir=folder)
    except OSError as error:
        raise FileError(
            f"cannot measure the tier in {folder}: {error.strerror}; make the folder, name another "
            "one, or write its speeds down"
        ) from None
    os.close(file)
    try:
        handle = _direct(name)
        try:
            sample = mmap.mmap(-1, _PIECE_BYTES)
            sample[:] = os.urandom(4096) * (_PIECE_BYTES // 4096)
            write = _timed(handle, sample, os.pwritev)
            return _timed(handle, sample, os.preadv), write
        finally:
            os.close(handle)
    except OSError as error:
        raise FileError(f"cannot measure the tier in {folder}: {error.strerror}") from None
    finally:
        os.unlink(name)


def _direct(name: str) -> int:
    if hasattr(os, "O_DIRECT"):
        with suppress(OSError):
            return os.open(name, os.O_RDWR | os.O_DIRECT)
    return os.open(name, os.O_RDWR)


def _timed(
    handle: int, piece: mmap.mmap, move: Callable[[int, list[mmap.mmap], int], int]
) -> float:
    """Bytes per second of one pass over the sample."""
    begin = time.perf_counter()
    for offset in range(0, _SAMPLE_BYTES, _PIECE_BYTES):
        move(handle, [piece], offset)
    os.fdatasync(handle)
    return _SAMPLE_BYTES / max(time.perf_counter() - begin, 1e-9)
