"""Writing beside training: state is copied, and a thread writes the copy.

The copies stay for the next checkpoint, since memory that is mapped anew costs as much again as the
copying itself. So a process that saves holds its part of the state twice.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor


class Saver:
    """Runs one writing after the other in a thread of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._writing: deque[Future[None]] = deque()
        self._copies: dict[str, Tensor] = {}

    def wait(self) -> None:
        """Wait until what was begun is on the disk.

        Raises:
            FileError: it could not be written; told once.
        """
        while self._writing:
            self._writing.popleft().result()

    def check(self) -> None:
        """Raise what ``wait`` would raise, if that is known already."""
        while self._writing and self._writing[0].done():
            self._writing.popleft().result()

    def begin(self, write: Callable[[], None]) -> None:
        """Write in the background, behind what was begun before."""
        with self._lock:  # ranks in threads begin each their own
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "penstock-saving")
            self._writing.append(self._thread.submit(write))

    def copied(self, whose: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of tensors in main memory, which stay what they are until the next call with this
        name.

        Args:
            whose: the name under which memory is kept for the next time.
            tensors: by name, of any device.
        """
        return {
            name: self._room(f"{whose}/{name}", tensor).copy_(tensor.detach())
            for name, tensor in tensors.items()
        }

    def _room(self, key: str, tensor: Tensor) -> Tensor:
        room = self._copies.get(key)
        if room is None or room.shape != tensor.shape or room.dtype != tensor.dtype:
            room = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._copies[key] = room
        return room

    def close(self) -> None:
        """Wait for what was begun, and let go of the copies.

        Raises:
            FileError: as ``wait``.
        """
        try:
            self.wait()
        finally:
            self._copies.clear()
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None
