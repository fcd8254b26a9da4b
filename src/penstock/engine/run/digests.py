"""Digests of what every rank must have been given alike, which messages carry.

Under torchrun each process calls the pipeline for itself. The first stage's rank takes the inputs
and the last stage's the targets, so if their loaders shuffle differently, rows are paired with the
labels of others, and nothing fails; likewise if one of them enters autocast or calls ``eval()``. A
digest is a few numbers that tell what was called, with how many microbatches, of which data, in
which modes. It travels with each value that a stage hands to the next and with the gradients that
copies of a stage sum, and who takes such a message compares it with its own digest: before it
computes with it, so that no weight changes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn

from penstock.base.errors import RunError
from penstock.engine.model import tree
from penstock.engine.model.microbatches import Microbatches
from penstock.engine.transport import Edge, Noted, Transport
from penstock.engine.transport.base import RENEWED_TAGS, REPORT_TAG, SHARED_TAGS, OnTop

_FIELDS = struct.Struct("<BBBBIqdQQ")
_MOST_SAMPLES = 256
"""Each of them is a miss of the cache, on the way of a minibatch to its first forward."""
_ARRAY_DTYPES = frozenset({torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8})
_AUTOCAST_DTYPES = torch.bfloat16, torch.float16, torch.float32, torch.float64


class Call(IntEnum):
    """The method that was called."""

    EVALUATE = 1
    STEP = 2
    ACCUMULATE = 3
    LOOP = 4
    GATHER = 5

    def __str__(self) -> str:
        return _CALLS[self]


_CALLS = {
    Call.EVALUATE: "evaluate()",
    Call.STEP: "step()",
    Call.ACCUMULATE: "step(update=False)",
    Call.LOOP: "steps()",
    Call.GATHER: "gather_state_dict()",
}


class Modes(IntEnum):
    """The modes of the layers' modules; where these differ, their checksum stands for them."""

    NOT_COMPARED = 0
    TRAINING = 1
    EVALUATION = 2


class Next(IntEnum):
    """The thing behind a minibatch in the same loop."""

    NOTHING = 0
    MINIBATCH = 1
    LOADER_ERROR = 2


class CallDigest(NamedTuple):
    """A call in numbers, which ranks compare.

    Attributes:
        call: which method.
        behind: what comes next, see ``Next``.
        cpu_autocast, device_autocast: codes of autocast's dtype; 0 where it is off.
        modes: see ``Modes``.
        num_microbatches: how many there are.
        share: the factor on the gradients.
        inputs, targets: digests; 0 where they are not compared.
    """

    call: int
    behind: int = Next.NOTHING
    cpu_autocast: int = 0
    device_autocast: int = 0
    modes: int = Modes.NOT_COMPARED
    num_microbatches: int = 0
    share: float = 1.0
    inputs: int = 0
    targets: int = 0

    def packed(self) -> bytes:
        """The digest as the note of a message."""
        return _FIELDS.pack(*self)

    @classmethod
    def unpacked(cls, note: bytes) -> CallDigest:
        """Undo ``packed``."""
        return cls(*_FIELDS.unpack(note))


def autocast_codes(dtypes: Mapping[str, torch.dtype]) -> tuple[int, int]:
    """Autocast's dtypes on the CPU and on accelerators as small numbers; 0 where it is off.

    Args:
        dtypes: by device type, where autocast is on.
    """
    elsewhere = [_code(dtype) for kind, dtype in dtypes.items() if kind != "cpu"]
    return _code(dtypes["cpu"]) if "cpu" in dtypes else 0, max(elsewhere, default=0)


def _code(dtype: torch.dtype) -> int:
    known = dtype in _AUTOCAST_DTYPES
    return 1 + (_AUTOCAST_DTYPES.index(dtype) if known else len(_AUTOCAST_DTYPES))


def modes_of(modules: Iterable[nn.Module]) -> int:
    """A number that tells which modules are in training mode; 0 if there is none to compare."""
    modes = [module.training for module in modules]
    if not modes:
        return Modes.NOT_COMPARED
    if all(modes):
        return Modes.TRAINING
    return max(len(Modes), crc32(bytes(modes))) if any(modes) else Modes.EVALUATION


def data_digest(value: Any) -> int:
    """A number that differs, as good as surely, for different data; never 0.

    Of a tensor, shape, dtype and at most 256 numbers count, spread evenly over all its dimensions:
    what takes 10 µs tells two minibatches apart, if not two that differ in a few numbers.
    """
    leaves, _ = tree.flatten(list(value) if isinstance(value, Microbatches) else value)
    check = len(leaves)
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            check = _check_of(leaf.detach(), check)
        elif isinstance(leaf, bool | int | float | str):
            check = crc32(repr(leaf).encode(errors="replace"), check)
    return check + 1


def _check_of(tensor: Tensor, check: int) -> int:
    kind, places = _kind_of(tuple(tensor.shape), tensor.dtype)
    check = crc32(kind, check)
    if tensor.layout is not torch.strided:
        return check
    if _is_array(tensor):
        # The same bytes in a third of the time.
        return crc32(tensor.numpy()[places].tobytes(), check)
    sample = tensor[places]
    flat = sample.resolve_conj().resolve_neg().contiguous().view(-1)
    return crc32(flat.view(torch.uint8).cpu().numpy().data, check)


def _is_array(tensor: Tensor) -> bool:
    """Whether numpy sees a tensor's numbers as they are."""
    return (
        type(tensor) is Tensor
        and tensor.dtype in _ARRAY_DTYPES
        and tensor.is_cpu
        and not tensor.is_neg()
    )


@lru_cache(maxsize=256)
def _kind_of(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[bytes, Any]:
    """What tells tensors of a shape and a type from others, and which of their numbers count."""
    places = _places(shape) if math.prod(shape) > _MOST_SAMPLES else ...
    return f"{shape} {dtype}".encode(), places


def _places(shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Which numbers count: in the middle of the parts of each dimension, since borders are often
    empty."""
    steps = [1] * len(shape)
    counts = list(shape)
    while torch.Size(counts).numel() > _MOST_SAMPLES:
        largest = counts.index(max(counts))
        steps[largest] *= 2
        counts[largest] = -(-shape[largest] // steps[largest])
    return tuple(slice(step // 2, None, step) for step in steps)


def check_alike(own: bytes, other: bytes, ranks: tuple[int, int], where: str) -> None:
    """Raise if two ranks have not been given the same; nothing is compared with an empty note.

    Args:
        own: the packed digest of the first rank.
        other: the packed digest of the second.
        ranks: which two.
        where: what to begin the error with.

    Raises:
        RunError: they differ; it says in what, and what to do.
    """
    if own == other or not own or not other:
        return
    difference = _difference(CallDigest.unpacked(own), CallDigest.unpacked(other), ranks)
    if difference:
        raise RunError(f"{where}: {difference}")


def _difference(own: CallDigest, other: CallDigest, ranks: tuple[int, int]) -> str:
    checks = _different_calls, _different_sizes, _different_modes, _different_data, _different_ends
    return next(filter(None, (check(own, other, *ranks) for check in checks)), "")


def _different_calls(own: CallDigest, other: CallDigest, mine: int, theirs: int) -> str:
    if _comes_to(own.call) == _comes_to(other.call):
        return ""
    return (
        f"rank {mine} calls {Call(own.call)}, but rank {theirs} {Call(other.call)}; make the "
        "same calls on every rank"
    )


def _comes_to(call: int) -> int:
    """The call that ranks must have in common: a loop's last minibatch trains as ``step`` does."""
    return Call.STEP if call == Call.LOOP else call


def _different_sizes(own: CallDigest, other: CallDigest, mine: int, theirs: int) -> str:
    if own.num_microbatches != other.num_microbatches:
        return (
            f"rank {mine} has {own.num_microbatches} microbatches, but rank {theirs} has "
            f"{other.num_microbatches}; give every rank minibatches of as many rows"
        )
    if own.share != other.share:
        return (
            f"share is {own.share:g} on rank {mine}, but {other.share:g} on rank {theirs}; give "
            "every rank the same"
        )
    return ""


def _different_modes(own: CallDigest, other: CallDigest, mine: int, theirs: int) -> str:
    codes = {
        "cpu": (own.cpu_autocast, other.cpu_autocast),
        "the accelerator": (own.device_autocast, other.device_autocast),
    }
    for kind, (here, there) in codes.items():
        if here != there:
            return (
                f"autocast of {kind} is {_autocast_text(here)} on rank {mine}, but "
                f"{_autocast_text(there)} on rank {theirs}; use the same torch.autocast around "
                "the call on every rank"
            )
    if own.modes == other.modes or not own.modes or not other.modes:
        return ""
    text, text_there = _mode_text(own.modes), _mode_text(other.modes)
    text_there = "others are" if text_there == text else text_there
    return (
        f"the layers are {text} on rank {mine}, but {text_there} on rank {theirs}; call train() "
        "and eval() alike on every rank"
    )


def _autocast_text(code: int) -> str:
    if not code:
        return "off"
    known = code <= len(_AUTOCAST_DTYPES)
    return str(_AUTOCAST_DTYPES[code - 1]).removeprefix("torch.") if known else "another dtype"


def _mode_text(modes: int) -> str:
    if modes >= len(Modes):
        return "partly in evaluation mode"
    return f"in {Modes(modes).name.lower()} mode"


def _different_data(own: CallDigest, other: CallDigest, mine: int, theirs: int) -> str:
    for given in ("inputs", "targets"):
        digests = getattr(own, given), getattr(other, given)
        if all(digests) and digests[0] != digests[1]:
            return (
                f"ranks {mine} and {theirs} train on different data: their {given} differ. The "
                "first stage's rank takes the inputs and the last one's the targets, so rows would "
                "be paired with the targets of others. Give every rank the same minibatches: "
                "shuffle with the same seed everywhere (DataLoader(…, "
                "generator=torch.Generator().manual_seed(0))) and leave out DistributedSampler. If "
                "they differ on purpose, give Pipeline(…, compare_data=False)"
            )
    return ""


def _different_ends(own: CallDigest, other: CallDigest, mine: int, theirs: int) -> str:
    if own.behind == other.behind:
        return ""
    if Next.LOADER_ERROR in (own.behind, other.behind):
        broken, whole = (mine, theirs) if own.behind == Next.LOADER_ERROR else (theirs, mine)
        return (
            f"the loader of rank {broken} has raised an error behind this minibatch (that rank's "
            f"own error says which), but not that of rank {whole}"
        )
    ends, goes_on = (theirs, mine) if own.behind else (mine, theirs)
    if own.call != other.call:
        return (
            f"rank {ends} calls step(), but rank {goes_on} is in a loop over steps() that goes on; "
            "make the same calls on every rank"
        )
    if own.call == Call.EVALUATE:
        return (
            f"rank {ends} ends its evaluation with this minibatch, but rank {goes_on} goes on; "
            "give every rank the same held-out data"
        )
    return (
        f"rank {ends} ends its loop with this minibatch, but rank {goes_on} goes on; give every "
        "rank as many minibatches, and let all leave the loop at the same one"
    )


class ComparingTransport(OnTop):
    """Notes digests on what one rank sends, and compares the digests of what it gets.

    What is sent with a note keeps it, and a report comes with its note: who waits for one compares
    it, since the minibatch at hand may be a later one.

    Args:
        inner: carries the messages.
        rank: the one whose messages they are.

    Attributes:
        digest: what was called, packed; empty: nothing is compared.
        synchronous: whether all that is under way belongs to this minibatch.
    """

    def __init__(self, inner: Transport, rank: int) -> None:
        super().__init__(inner)
        self._rank = rank
        self.digest = b""
        self.synchronous = True

    def send(self, edge: Edge, number: int, value: Any) -> None:
        noted = self.digest and type(value) is not Noted and self._has_digest(edge)
        self.inner.send(edge, number, Noted(value, self.digest) if noted else value)

    def recv(self, edge: Edge, number: int, waiting: str) -> Any:
        value = self.inner.recv(edge, number, waiting)
        if type(value) is Noted and edge.tag != REPORT_TAG:
            value, digest = value
            if digest != self.digest:
                check_alike(self.digest, digest, (self._rank, edge.source), waiting)
        return value

    def _has_digest(self, edge: Edge) -> bool:
        """Whether messages of an edge belong to the minibatch at hand: gradients that come back may
        be those of an earlier one, and so may weights that others have updated."""
        forward = edge.tag < REPORT_TAG and edge.tag % 2 == 0
        return forward or (SHARED_TAGS <= edge.tag < RENEWED_TAGS and self.synchronous)
