"""Tiers: where weights are while they are not in memory that computes.

A tier is one long row of bytes, of which parts are reserved before anything is written. Every part
remembers a sum of each of its pages when it is written, so that a bit that flips on a disk is found
when it is read, with the page it is in; sums of pages are an eighth of a per cent of what they
guard, and summing runs at several gigabytes per second.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from penstock.base.errors import FileError
from penstock.base.units import format_bytes
from penstock.core.cluster.parts import Tier
from penstock.core.schedule.residence import PAGE, whole_pages
from penstock.engine.weights.movers import pinned_bytes

_PIECE = 16 << 20
"""Bytes that are moved at once: what is more urgent waits for no more."""
_WORD = 8
_Move = Callable[[int, list[memoryview], int], int]


class Extent:
    """A reserved part of a tier.

    Attributes:
        whose: what lies in it, for errors, such as ``"weights of stage 3"``.
        offset, num_bytes: where it begins and how long it is: whole pages.
        is_held: whether somebody still reads what lies there, so that nothing may be written to it.
    """

    __slots__ = ("is_held", "num_bytes", "offset", "sums", "whose")

    def __init__(self, whose: str, offset: int, num_bytes: int) -> None:
        self.whose = whose
        self.offset = offset
        self.num_bytes = num_bytes
        self.sums: npt.NDArray[np.uint64] | None = None
        self.is_held = False


class TierSpace(ABC):
    """A tier in use by one rank, of which parts are reserved.

    Attributes:
        read_bytes, written_bytes: what has been moved so far.
    """

    def __init__(self) -> None:
        self.read_bytes = self.written_bytes = 0
        self._end = 0
        self._lock = threading.Lock()

    def reserve(self, whose: str, num_bytes: int) -> Extent:
        """Room for so many bytes, which nobody else gets.

        Args:
            whose: what will lie there, for errors.

        Raises:
            FileError: there is no such room.
        """
        with self._lock:
            extent = Extent(whose, self._end, whole_pages(num_bytes))
            self._grow(extent)
            self._end += extent.num_bytes
        return extent

    @abstractmethod
    def _grow(self, extent: Extent) -> None:
        """Make sure that there is room for one more extent."""

    @abstractmethod
    def close(self) -> None:
        """Give back all that was reserved."""


class Store(TierSpace):
    """A tier that the host reads and writes; both may go on in two threads at once."""

    def write(self, extent: Extent, memory: memoryview) -> None:
        """Write all of an extent.

        Raises:
            FileError: it could not be written.
        """
        for _ in self.writing(extent, memory):
            pass

    def writing(self, extent: Extent, memory: memoryview) -> Generator[None, None, None]:
        """As ``write``, piece by piece."""
        extent.sums = np.empty(extent.num_bytes // PAGE, np.uint64)
        for start, stop in self.pieces(extent):
            piece = memory[start:stop]
            extent.sums[start // PAGE : stop // PAGE] = _sums(piece)
            self._put(extent, piece, start)
            yield
        self.written_bytes += extent.num_bytes

    def reading(self, extent: Extent, memory: memoryview) -> Generator[None, None, None]:
        """Read all of an extent, piece by piece, and hold it against what was written.

        Raises:
            FileError: it could not be read, or is not what was written.
        """
        for start, stop in self.pieces(extent):
            self.read_piece(extent, start, memory[start:stop])
            yield

    def read_piece(self, extent: Extent, start: int, memory: memoryview) -> None:
        """Read one of the ``pieces`` of an extent.

        Raises:
            FileError: as ``reading``.
        """
        self.peek(extent, start, memory)
        self.read_bytes += len(memory)

    @staticmethod
    def pieces(extent: Extent) -> Iterator[tuple[int, int]]:
        """Where the pieces begin and end in which an extent is moved, in bytes from its beginning:
        each is a multiple of a page."""
        for start in range(0, extent.num_bytes, _PIECE):
            yield start, min(start + _PIECE, extent.num_bytes)

    def peek(self, extent: Extent, start: int, memory: memoryview) -> None:
        """Read some pages of an extent, for whoever is no part of training: not counted.

        Args:
            start: the first of the pages, in bytes from the beginning of the extent.

        Raises:
            FileError: as ``reading``.
        """
        self._get(extent, start, memory)
        self._check(extent, start, memory)

    def _check(self, extent: Extent, start: int, memory: memoryview) -> None:
        """Hold what was read against what was written."""
        if extent.sums is None:
            raise FileError(f"{extent.whose}: nothing was written at {self} before it was read")
        first = start // PAGE
        sums = _sums(memory)
        (wrong,) = np.nonzero(sums != extent.sums[first : first + len(sums)])
        if len(wrong):
            offset = extent.offset + start + int(wrong[0]) * PAGE
            raise FileError(
                f"{extent.whose}: what {self} holds at offset {offset} is not what was written "
                f"there ({len(wrong)} of {len(sums)} pages differ); the disk is not to be "
                "trusted: go on from the last checkpoint, with a tier elsewhere"
            )

    @abstractmethod
    def _put(self, extent: Extent, memory: memoryview, start: int = 0) -> None:
        """Write what is in the memory, from a byte of the extent on."""

    @abstractmethod
    def _get(self, extent: Extent, start: int, memory: memoryview) -> None:
        """Read as much as fits into the memory, from a byte of the extent on."""


def _sums(memory: memoryview) -> npt.NDArray[np.uint64]:
    """The sum of each page, modulo 2⁶⁴: another one if any single bit is another one."""
    words = np.frombuffer(memory, np.uint64).reshape(-1, PAGE // _WORD)
    sums: npt.NDArray[np.uint64] = np.add.reduce(words, axis=1)
    return sums


class HostStore(Store):
    """Main memory as a tier."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: dict[int, mmap.mmap] = {}

    def __str__(self) -> str:
        return "main memory"

    def _grow(self, extent: Extent) -> None:
        if extent.num_bytes:
            try:
                self._parts[extent.offset] = mmap.mmap(-1, extent.num_bytes)
            except OSError as error:
                raise _full(extent, str(self), error) from None

    def _put(self, extent: Extent, memory: memoryview, start: int = 0) -> None:
        _copy(memory, self._part(extent, start, len(memory)))

    def _get(self, extent: Extent, start: int, memory: memoryview) -> None:
        _copy(self._part(extent, start, len(memory)), memory)

    def _part(self, extent: Extent, start: int, length: int) -> memoryview:
        return memoryview(self._parts[extent.offset])[start : start + length]

    def close(self) -> None:
        """Give the memory back."""
        self._parts.clear()


def _copy(source: memoryview, target: memoryview) -> None:
    """Copy bytes. numpy lets other threads go on meanwhile, as memoryviews do not."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


class PinnedSpace(TierSpace):
    """Main memory as a tier of an accelerator, which copies from and to it by itself. There are no
    sums of pages, since the host does not see what is copied."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: dict[int, Tensor] = {}

    def __str__(self) -> str:
        return "pinned main memory"

    def _grow(self, extent: Extent) -> None:
        if extent.num_bytes:
            try:
                self._parts[extent.offset] = pinned_bytes(extent.num_bytes)
            except RuntimeError as error:
                raise FileError(
                    f"there is no pinned main memory for {format_bytes(extent.num_bytes)} of "
                    f"{extent.whose}, behind {format_bytes(extent.offset)} that are reserved: "
                    f"{error}; take a disk as tier"
                ) from None

    def part(self, extent: Extent) -> Tensor:
        """The bytes of an extent."""
        return self._parts[extent.offset]

    def close(self) -> None:
        """Give the memory back."""
        self._parts.clear()


class DiskStore(Store):
    """A file without a name: however the process ends, nothing of it is left.

    Where the file system can, bytes go past the page cache (``O_DIRECT``), which would otherwise
    take as much memory as the budget saves.

    Args:
        folder: where the file is.

    Raises:
        FileError: no file can be made there.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._file = -1
        self._folder = folder or tempfile.gettempdir()
        self._file = _opened(self._folder)

    def __str__(self) -> str:
        return f"the spill file in {self._folder}"

    def _grow(self, extent: Extent) -> None:
        if not extent.num_bytes:
            return
        try:
            os.posix_fallocate(self._file, extent.offset, extent.num_bytes)
        except OSError as error:
            raise _full(extent, self._folder, error) from None

    def _put(self, extent: Extent, memory: memoryview, start: int = 0) -> None:
        self._move(extent, start, memory, os.pwritev, "write")

    def _get(self, extent: Extent, start: int, memory: memoryview) -> None:
        self._move(extent, start, memory[: extent.num_bytes - start], os.preadv, "read")

    def _move(
        self, extent: Extent, start: int, memory: memoryview, move: _Move, doing: str
    ) -> None:
        done, first = 0, extent.offset + start
        while done < len(memory):
            try:
                moved = move(self._file, [memory[done:]], first + done)
            except OSError as error:
                raise FileError(
                    f"cannot {doing} the {extent.whose} in {self._folder}, at offset "
                    f"{first + done}: {error.strerror}; go on from the last checkpoint"
                ) from error
            if moved <= 0:
                raise FileError(
                    f"{self} ends at offset {first + done}, in the {extent.whose}; "
                    "somebody has cut it"
                )
            done += moved

    def __del__(self) -> None:
        """Who failed before it could close the file must not keep the room on the disk."""
        self.close()

    def close(self) -> None:
        """Give the room on the disk back."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _opened(folder: str) -> int:
    """A new file without a name, which goes past the page cache where that can be."""
    if not Path(folder).is_dir():
        raise FileError(f"the tier's folder {folder} is not there; make it, or name another one")
    direct = getattr(os, "O_DIRECT", 0)
    for more in (direct, 0) if direct else (0,):
        # Some file systems have one of the two, some neither.
        if hasattr(os, "O_TMPFILE"):
            with suppress(OSError):
                return os.open(folder, os.O_TMPFILE | os.O_RDWR | more, 0o600)
    try:
        file, name = tempfile.mkstemp(prefix=".penstock-", dir=folder)
    except OSError as error:
        raise FileError(
            f"cannot make a spill file in {folder}: {error.strerror}; name a folder that this "
            "process may write to"
        ) from None
    os.unlink(name)
    return file


def _full(extent: Extent, where: str, error: OSError) -> FileError:
    room = ""
    if error.errno == errno.ENOSPC:
        with suppress(OSError):
            disk = os.statvfs(where)
            room = f" ({format_bytes(disk.f_bavail * disk.f_frsize)} are free)"
    return FileError(
        f"{where} has no room for {format_bytes(extent.num_bytes)} of {extent.whose}, behind "
        f"{format_bytes(extent.offset)} that are reserved{room}: {error.strerror}; make room, or "
        "name another folder"
    )


def opened(tier: Tier) -> Store:
    """The store of a tier.

    Raises:
        FileError: nothing can be kept there.
    """
    return HostStore() if tier.kind == "host" else DiskStore(tier.folder)
