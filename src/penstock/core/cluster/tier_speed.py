"""How fast a tier is that stages are to come from, as training finds it: while it is read, it is
written as well, pages are summed, and compute takes cores and memory from all of that.

A tier that has the machine for itself is faster, and plans by that speed promise steps that are too
short.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

from msgspec.structs import replace

from penstock.base.errors import FileError
from penstock.core.cluster.parts import Tier

_SAMPLE_BYTES = 32 << 20
_PIECE_BYTES = 8 << 20
_WIDTH = 512
"""Of the matrices that are multiplied meanwhile: three of them, 3 MiB in all."""
_LEAST_ROUNDS, _MOST_ROUNDS = 2, 20
_LEAST_SECONDS = 0.2
_COPIED_BYTES_PER_SECOND = 5e9
"""Of main memory as the tier of an accelerator, which copies by itself: what nobody measures."""
_Move = Callable[[int], object]
"""Moves the piece that begins at some byte of the sample."""


def measured(tier: Tier, *, computes_on_host: bool = True) -> Tier:
    """A tier with its speeds; those that are written down stay.

    Args:
        tier: of a disk, a sample is written to its folder and read back, past the page cache where
            the file system can; of main memory, it is copied. It takes a fraction of a second on a
            fast disk.
        computes_on_host: whether ranks compute on this machine's cores, which then multiply
            matrices meanwhile; accelerators take nothing from a transfer.

    Raises:
        FileError: nothing can be written there.
    """
    if tier.read_bytes_per_second and tier.write_bytes_per_second:
        return tier
    read = write = _COPIED_BYTES_PER_SECOND
    beside = _computing() if computes_on_host else nullcontext()
    if tier.kind == "disk":
        read, write = _disk(tier.folder or tempfile.gettempdir(), beside)
    elif computes_on_host:
        read, write = _host(beside)
    return replace(
        tier,
        read_bytes_per_second=tier.read_bytes_per_second or read,
        write_bytes_per_second=tier.write_bytes_per_second or write,
    )


def _host(beside: AbstractContextManager[None]) -> tuple[float, float]:
    import numpy as np

    there = np.ones(_SAMPLE_BYTES, np.uint8)
    pieces = [np.ones(_PIECE_BYTES, np.uint8) for _ in range(2)]

    def read(offset: int) -> None:
        np.copyto(pieces[0], there[offset : offset + _PIECE_BYTES])
        _sum(pieces[0].data)

    def write(offset: int) -> None:
        _sum(pieces[1].data)
        np.copyto(there[offset : offset + _PIECE_BYTES], pieces[1])

    return _timed(read, write, beside)


def _disk(folder: str, beside: AbstractContextManager[None]) -> tuple[float, float]:
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
            return _speeds_of(handle, beside)
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


def _speeds_of(handle: int, beside: AbstractContextManager[None]) -> tuple[float, float]:
    pieces = [mmap.mmap(-1, _PIECE_BYTES) for _ in range(2)]
    for piece in pieces:
        piece[:] = os.urandom(4096) * (_PIECE_BYTES // 4096)

    def read(offset: int) -> None:
        os.preadv(handle, [pieces[0]], offset)
        _sum(memoryview(pieces[0]))

    def write(offset: int) -> None:
        _sum(memoryview(pieces[1]))
        os.pwritev(handle, [pieces[1]], offset)
        if offset + _PIECE_BYTES == _SAMPLE_BYTES:
            os.fdatasync(handle)

    for offset in range(0, _SAMPLE_BYTES, _PIECE_BYTES):  # what is there to be read
        write(offset)
    return _timed(read, write, beside)


def _sum(memory: memoryview) -> None:
    """Add up every page, as what guards tiers does in the thread of the transfer."""
    import numpy as np

    np.add.reduce(np.frombuffer(memory, np.uint64).reshape(-1, 512), axis=1)


def _timed(read: _Move, write: _Move, beside: AbstractContextManager[None]) -> tuple[float, float]:
    """Bytes per second of reading and of writing, both at once and beside something else."""
    threads = [_TransferThread(read), _TransferThread(write)]
    with beside:
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        while not all(thread.num_rounds >= _LEAST_ROUNDS for thread in threads) or (
            time.perf_counter() - begin < _LEAST_SECONDS
        ):
            if not all(thread.is_alive() for thread in threads):
                break
            time.sleep(0.005)
        for thread in threads:
            thread.ends = True
        for thread in threads:
            thread.join()
    for thread in threads:
        if thread.error is not None:
            raise thread.error
    return threads[0].speed, threads[1].speed


class _TransferThread(threading.Thread):
    """Moves the sample again and again until it is told to end.

    Attributes:
        ends: set it, and the thread ends behind its round.
        num_rounds: how often it has moved all of it.
        error: what the system said, if it could not.
    """

    def __init__(self, move: _Move) -> None:
        super().__init__(daemon=True)
        self._move = move
        self._seconds = 0.0
        self.ends = False
        self.num_rounds = 0
        self.error: OSError | None = None

    def run(self) -> None:
        """Move, and note how long that takes."""
        try:
            while self.num_rounds == 0 or (not self.ends and self.num_rounds < _MOST_ROUNDS):
                begin = time.perf_counter()
                for offset in range(0, _SAMPLE_BYTES, _PIECE_BYTES):
                    self._move(offset)
                self._seconds += time.perf_counter() - begin
                self.num_rounds += 1
        except OSError as error:
            self.error = error

    @property
    def speed(self) -> float:
        """Bytes per second."""
        return self.num_rounds * _SAMPLE_BYTES / max(self._seconds, 1e-9)


@contextmanager
def _computing() -> Iterator[None]:
    """Multiply matrices meanwhile, on all cores that numpy takes."""
    import numpy as np

    left, right, product = (np.ones((_WIDTH, _WIDTH), np.float32) for _ in range(3))
    ended = threading.Event()

    def compute() -> None:
        while not ended.is_set():
            np.matmul(left, right, out=product)

    thread = threading.Thread(target=compute, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
