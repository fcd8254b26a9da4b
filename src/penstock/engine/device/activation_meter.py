"""Count the bytes of activations that are alive, exactly, while a model trains.

Resident memory is off by a factor of two: allocators keep freed pages, and parameters, gradients
and buffers of the transport are in it. What a schedule is judged by is what autograd keeps between
forward and backward. Its hooks on saved tensors see each of them when it is saved, and the wrapper
that we give autograd in its place dies when autograd lets go of it.

A wrapper may die in any thread and in the middle of anything (backward threads of an accelerator,
the garbage collector), so dying only leaves a note; notes are read before anything is counted or
asked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from penstock.engine.device.crossing import PLAIN_TENSORS

Key = Hashable
"""The owner of activations: (stage, microbatch)."""

_Note = tuple[Key, tuple[int, ...]]
_SPARSE_PARTS: dict[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


class ActivationMeter:
    """Counts the live activations of one rank.

    Counted are the storages of tensors that autograd has saved inside ``watching``, and of those
    given to ``keep``; one that is held several times, by whatever key, counts once. A view counts
    as the whole storage behind it, since that is what stays in memory.

    Not seen: tensors that a custom ``autograd.Function`` stores as attributes of its ``ctx``
    instead of with ``save_for_backward``, what ``torch.utils.checkpoint`` recomputes during the
    backward (its inputs are counted, unless they hide in tuples, lists or dictionaries), and
    tensors whose memory cannot be asked for, such as oneDNN's. ``torch.func.grad`` and its
    relatives refuse to run inside any such hooks.

    To be used from one thread. Activations may be freed in any.

    Args:
        excluded: parameters and buffers, whose storages are no activations. Their memory may be
            replaced (``parameter.data = …``) whenever no activation is alive.

    >>> meter = ActivationMeter()
    >>> inputs = torch.ones(10, requires_grad=True)
    >>> with meter.watching((0, 0)):
    ...     output = inputs.exp()
    >>> meter.live_bytes
    40
    >>> output.sum().backward()
    >>> meter.live_bytes, meter.peak_bytes
    (0, 40)
    """

    def __init__(self, excluded: Iterable[Tensor] = ()) -> None:
        self._excluded = tuple(excluded)
        self._excluded_addresses: set[int] = set()
        self._notes: deque[_Note] = deque()
        self._holds: dict[Key, dict[int, int]] = {}
        self._bytes_of: dict[int, int] = {}
        self._keys_of: dict[int, int] = {}
        self._live_bytes = self._peak_bytes = self._peak_keys = 0

    @property
    def live_bytes(self) -> int:
        """The bytes that are held now."""
        self._read_notes()
        return self._live_bytes

    @property
    def live_bytes_by_key(self) -> dict[Key, int]:
        """Bytes that each key holds now; what several keys share counts under each of them."""
        self._read_notes()
        return {
            key: sum(self._bytes_of[address] for address in held)
            for key, held in self._holds.items()
        }

    @property
    def peak_bytes(self) -> int:
        """The most bytes held at once, since the beginning or ``reset_peak``."""
        return self._peak_bytes

    @property
    def peak_keys(self) -> int:
        """The most keys that held anything at once, since the beginning or ``reset_peak``."""
        return self._peak_keys

    def reset_peak(self) -> None:
        """Begin new peaks with what is held now."""
        self._read_notes()
        self._peak_bytes, self._peak_keys = self._live_bytes, len(self._holds)

    def watching(
        self,
        key: Key,
        instead: Callable[[Tensor], Any] | None = None,
        around: Callable[[Saved], Any] | None = None,
    ) -> AbstractContextManager[None]:
        """While active in this thread, what autograd saves is counted for ``key``; except where
        ``instead`` gives something else to save. ``around`` as for ``saving``."""
        self._renew_excluded()

        def pack(tensor: Tensor) -> Any:
            other = instead(tensor) if instead is not None else None
            if other is not None:
                return other
            addresses = self._count(key, _storages(tensor))
            saved = plain(tensor)
            if addresses:
                saved = _CountedTensor(_without_history(tensor), (key, addresses), self._notes)
            return saved if around is None else around(saved)

        return saved_tensors_hooks(pack, _unpack)

    def keep(self, key: Key, tensors: Iterable[Tensor]) -> KeptMemory:
        """Count tensors that are held outside autograd, such as a stage's inputs.

        Returns:
            A holder of their memory: they count until it is released or dropped.
        """
        self._renew_excluded()
        storages = [storage for tensor in tensors for storage in _storages(tensor)]
        return KeptMemory(storages, (key, self._count(key, storages)), self._notes)

    def _count(self, key: Key, storages: Sequence[torch.UntypedStorage]) -> tuple[int, ...]:
        """Count storages for a key; gives the addresses that were counted."""
        self._read_notes()
        counted = []
        for storage in storages:
            address = storage.data_ptr()
            if not address or address in self._excluded_addresses:
                continue
            counted.append(address)
            held = self._holds.setdefault(key, {})
            held[address] = held.get(address, 0) + 1
            if held[address] > 1:
                continue
            self._keys_of[address] = self._keys_of.get(address, 0) + 1
            if self._keys_of[address] == 1:
                self._bytes_of[address] = storage.nbytes()
                self._live_bytes += self._bytes_of[address]
        self._peak_bytes = max(self._peak_bytes, self._live_bytes)
        self._peak_keys = max(self._peak_keys, len(self._holds))
        return tuple(counted)

    def _read_notes(self) -> None:
        while self._notes:
            key, addresses = self._notes.popleft()
            held = self._holds[key]
            for address in addresses:
                held[address] -= 1
                if not held[address]:
                    del held[address]
                    self._forget(address)
            if not held:
                del self._holds[key]

    def _forget(self, address: int) -> None:
        """Note that one key fewer holds a storage."""
        self._keys_of[address] -= 1
        if not self._keys_of[address]:
            del self._keys_of[address]
            self._live_bytes -= self._bytes_of.pop(address)

    def _renew_excluded(self) -> None:
        # An address that a parameter has left may be an activation's next.
        self._read_notes()
        if not self._holds:
            self._excluded_addresses = {
                storage.data_ptr() for tensor in self._excluded for storage in _storages(tensor)
            }


class KeptMemory:
    """Memory that is held outside autograd and counts until released; see ``keep``."""

    __slots__ = ("_note", "_notes", "_storages")

    def __init__(
        self, storages: Sequence[torch.UntypedStorage], note: _Note, notes: deque[_Note]
    ) -> None:
        # Held, so that no address is given to another storage while it counts.
        self._storages = storages
        self._note: _Note | None = note if note[1] else None
        self._notes = notes

    def release(self) -> None:
        """Stop counting; doing it again does nothing."""
        if self._note is not None:
            self._notes.append(self._note)
        self._note = None
        self._storages = ()

    def __del__(self) -> None:
        """Release what is dropped."""
        self.release()


class Saved:
    """A tensor that autograd saved, and its version at that time."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._version = tensor._version

    @property
    def tensor(self) -> Tensor:
        """The tensor, whether it is what it was or not."""
        return self._tensor

    @property
    def is_intact(self) -> bool:
        """Whether nobody has overwritten the tensor since it was saved."""
        return self._tensor._version == self._version

    def unpack(self) -> Tensor:
        """The tensor; autograd leaves the check of its version to whoever has hooks."""
        tensor = self._tensor
        if not self.is_intact:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: [{tensor.type()} {list(tensor.shape)}] is at version "
                f"{tensor._version}; expected version {self._version} instead. Do not overwrite "
                "it before the backward, or overwrite a clone."
            )
        return tensor


class _CountedTensor(Saved):
    """A saved tensor that counts as long as it lives."""

    __slots__ = ("_note", "_notes")

    def __init__(self, tensor: Tensor, note: _Note, notes: deque[_Note]) -> None:
        super().__init__(tensor)
        self._note = note
        self._notes = notes

    def __del__(self) -> None:
        self._notes.append(self._note)


def saving(
    instead: Callable[[Tensor], Any] | None, around: Callable[[Saved], Any] | None = None
) -> AbstractContextManager[None]:
    """While active in this thread, autograd saves something else than tensors.

    Args:
        instead: gives what is saved for a tensor, something with a method ``unpack``, or ``None``
            for the tensor itself.
        around: of a tensor itself, gives what is saved.
    """

    def pack(tensor: Tensor) -> Any:
        other = None if instead is None else instead(tensor)
        if other is not None:
            return other
        return plain(tensor) if around is None else around(plain(tensor))

    return saved_tensors_hooks(pack, _unpack)


def plain(tensor: Tensor) -> Saved:
    """Save a tensor as autograd saves it."""
    return Saved(_without_history(tensor))


def _without_history(tensor: Tensor) -> Tensor:
    # With it, an output would make the graph hold itself; detached, it shares memory and version.
    return tensor if tensor.is_leaf else tensor.detach()


def _unpack(saved: Any) -> Tensor:
    unpacked: Tensor = saved.unpack()
    return unpacked


def _storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    """The memory behind a tensor: several pieces if it is sparse or wraps other tensors."""
    wraps = type(tensor) not in PLAIN_TENSORS and hasattr(tensor, "__tensor_flatten__")
    if tensor.layout is torch.strided and not wraps:
        return [tensor.untyped_storage()]
    return [storage for part in _parts(tensor) for storage in _storages(part)]


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield getattr(tensor, name)
    else:
        for name in _SPARSE_PARTS.get(tensor.layout, ()):
            yield getattr(tensor, name)()
