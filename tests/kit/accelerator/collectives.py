"""A collective library for the emulated devices, for tensors between processes; it sends and
receives, and does nothing else.

``register`` makes it what torch takes for these devices, as NCCL is for CUDA. It has the rules of
such libraries, and is strict about each of them:

- What is posted to a group goes to a stream of the library's own, one for each other rank, which
  waits for the stream that is current then. ``work.wait()`` makes the stream that is current
  then wait for it. The host goes on at once. So the devices' ledger sees every read and write
  where it happens, and raises where somebody else's is not ordered with it.
- Two ranks connect when both post for the first time; until then the host does wait.
- A send is over when the other rank has posted its receive, and not before.
- What two ranks post to a group passes in order: the n-th that one posts is the counterpart of the
  n-th that the other posts. Two sends, two receives or two sizes raise; and so does a wait for
  something that the other rank does not post in time, which on hardware would last for ever.
- ``is_completed`` says no before ``wait``: not every library looks at its stream unasked.
- Nothing is kept alive for the caller but the memory that a receive writes to, until its wait.

Bytes travel when things are posted, by the store of the group. What a receive has not been waited
for reads as bytes of 0x7F.
"""

from __future__ import annotations

import ctypes
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.kit.accelerator.device_module import NAME

LIBRARY = "emulated"
PATIENCE = timedelta(seconds=30)
_SENDS, _RECEIVES = b"s", b"r"


class Done:
    """What this process has done so far, over all groups."""

    num_bytes_sent = num_connected = 0


DONE = Done()


class Library(dist.ProcessGroup):
    """One rank's end of a group."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self._store = store
        self._rank, self._size = rank, size
        self._channels: dict[int, _Channel] = {}
        self._name = ""

    def size(self):
        return self._size

    def rank(self):
        return self._rank

    def get_group_store(self):
        return self._store

    def getBackendName(self):
        return LIBRARY

    @property
    def group_name(self):
        # torch asks again when it has already forgotten the group.
        self._name = dist.distributed_c10d._world.pg_names.get(self, self._name)
        return self._name

    def send(self, tensors, target, tag):
        return self._channel(target).post(*tensors, _SENDS)

    def recv(self, tensors, source, tag):
        return self._channel(source).post(*tensors, _RECEIVES)

    def abort(self):
        pass

    def shutdown(self):
        pass

    def _channel(self, other):
        if other not in self._channels:
            low, high = sorted((self._rank, other))
            store = dist.PrefixStore(f"{low}-{high}", self._store)
            self._channels[other] = _Channel(store, self._rank, other)
        return self._channels[other]


class _Channel:
    """What one rank posts for one other, in its order."""

    def __init__(self, store, rank, other):
        self._store = store
        self._rank, self._other = rank, other
        self._stream: torch.Stream | None = None
        self._posted: list[tuple[bytes, int]] = []
        self._met: list[bytes] = []

    def post(self, tensor, kind):
        if tensor.device.type != NAME or not tensor.is_contiguous():
            raise ValueError("the library takes tensors of its devices that have no gaps")
        if self._stream is None:
            self._connect()
            self._stream = torch.Stream(tensor.device)
        stream = self._stream
        stream.wait_event(torch.accelerator.current_stream(tensor.device).record_event())
        contents = b""
        with stream:
            if kind is _SENDS:
                seen = tensor.clone()
                contents = ctypes.string_at(seen.data_ptr(), tensor.nbytes)
                DONE.num_bytes_sent += tensor.nbytes
            else:
                tensor.view(torch.uint8).fill_(0x7F)
        turn = len(self._posted)
        self._posted.append((kind, tensor.nbytes))
        told = kind + tensor.nbytes.to_bytes(8, "big") + contents
        self._store.set(f"{turn}/{self._rank}", told.hex())
        return _Work(self, turn, stream.record_event(), None if kind is _SENDS else tensor)

    def _connect(self):
        DONE.num_connected += 1
        self._store.set(f"connect/{self._rank}", "")
        try:
            self._store.wait([f"connect/{self._other}"], PATIENCE)
        except RuntimeError as error:
            raise RuntimeError(
                f"deadlock: rank {self._rank} of a group waits for rank {self._other} to connect"
            ) from error

    def contents(self, turn):
        """What the other rank has posted; waits for that."""
        while len(self._met) <= turn:
            try:
                self._store.wait([self._key(len(self._met))], PATIENCE)
            except RuntimeError as error:
                raise RuntimeError(
                    f"deadlock: what rank {self._rank} of the group has posted as number "
                    f"{len(self._met)} waits for rank {self._other}, which posts nothing"
                ) from error
            self._meet()
        return self._met[turn]

    def _meet(self):
        turn = len(self._met)
        told = bytes.fromhex(self._store.get(self._key(turn)).decode())
        kind, num_bytes = told[:1], int.from_bytes(told[1:9], "big")
        own, own_bytes = self._posted[turn]
        names = {_SENDS: "sends", _RECEIVES: "receives"}
        if kind == own:
            raise RuntimeError(
                f"deadlock: both ranks post {names[own]} as number {turn} of one group"
            )
        if num_bytes != own_bytes:
            raise RuntimeError(
                f"number {turn} of a group {names[own]} {own_bytes} bytes, but its counterpart "
                f"{names[kind]} {num_bytes}"
            )
        self._met.append(told[9:])

    def _key(self, turn):
        return f"{turn}/{self._other}"


class _Work:
    """Something posted."""

    def __init__(self, channel, turn, event, room):
        self._channel, self._turn, self._event, self._room = channel, turn, event, room
        self._was_waited_for = False

    def wait(self, timeout=None):
        contents = self._channel.contents(self._turn)
        if self._room is not None:
            ctypes.memmove(self._room.data_ptr(), contents, len(contents))
            self._room = None
        torch.accelerator.current_stream(self._event.device).wait_event(self._event)
        self._was_waited_for = True
        return True

    def is_completed(self):
        return self._was_waited_for and self._event.query()


def register():
    """Makes the library the one that torch takes for the emulated devices."""
    if LIBRARY not in dist.Backend.backend_list:
        dist.Backend.register_backend(LIBRARY, Library, devices=[NAME])
