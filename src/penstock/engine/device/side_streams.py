"""Streams of one device on which a rank's weights come and go, beside its compute.

Nobody waits on the host. What comes is written behind the last use of the memory that it goes to;
what goes is read behind the ops that made it; and who needs what has come lets its own stream wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from penstock.engine.device.accelerators import can_pin


class SideStreams:
    """Streams of an accelerator: what comes in does not wait for what goes out, nor what is urgent
    for what else comes in.

    Args:
        device: the accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._coming = torch.Stream(device)
        self._overtaking = torch.Stream(device)
        self._going = torch.Stream(device)

    def now(self) -> torch.Event:
        """When all has happened that this thread's current stream has been asked for."""
        return torch.accelerator.current_stream(self._device).record_event()

    def bring(
        self,
        target: Tensor,
        source: Tensor,
        behind: Iterable[torch.Event | None],
        *,
        overtakes: bool = False,
    ) -> torch.Event:
        """Copy main memory to the device.

        Args:
            target: on the device.
            source: in main memory; if that is pinned, it must stay as it is until the copy is made.
            behind: after which moments; ``None`` is over.
            overtakes: whether it comes beside what else is on its way here, and not behind it.

        Returns:
            When the copy is made.
        """
        stream = self._overtaking if overtakes else self._coming
        return self._copied(stream, target, source, target, behind)

    def take_out(
        self, target: Tensor, source: Tensor, behind: Iterable[torch.Event | None]
    ) -> torch.Event:
        """Copy from the device to main memory; arguments as for ``bring``, the other way round."""
        return self._copied(self._going, target, source, source, behind)

    def take_all_out(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> torch.Event:
        """Copy (target, source) pairs to main memory, behind all that this thread's current stream
        has been asked for. Who keeps the sources until that stream comes behind the end of it can
        let their memory be used again at once.

        Returns:
            When the copies are made.
        """
        self._going.wait_event(self.now())
        with self._going:
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return self._going.record_event()

    def _copied(
        self,
        stream: torch.Stream,
        target: Tensor,
        source: Tensor,
        on_device: Tensor,
        behind: Iterable[torch.Event | None],
    ) -> torch.Event:
        for moment in behind:
            if moment is not None:
                stream.wait_event(moment)
        with stream:
            target.copy_(source, non_blocking=True)
        on_device.record_stream(stream)
        return stream.record_event()

    def settle(self) -> None:
        """Wait, on the host, until all copies are made."""
        self._coming.synchronize()
        self._overtaking.synchronize()
        self._going.synchronize()


def pinned_bytes(num_bytes: int) -> Tensor:
    """Bytes in main memory that devices copy from and to without the host; where the kind of device
    has no such memory, ordinary ones, and then the host waits for copies.

    Raises:
        RuntimeError: there is no such memory left.
    """
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=can_pin())
