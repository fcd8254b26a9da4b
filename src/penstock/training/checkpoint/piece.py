"""One file of a checkpoint: the state of one stage, or of a part of one.

How a piece is written; a kill between any two steps leaves what was there before:

1. All of it goes to a file beside, whose name begins with a dot.
2. The file is flushed to the disk.
3. It is renamed, which is atomic, and then the folder is flushed.

The format is a head in JSON and the bytes of all tensors, one behind the other. Its own writer
wants all tensors in memory at once; where some lie on a tier, the file is written here. Whoever
reads it sees no difference.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from penstock.base.errors import FileError
from penstock.engine.weights.transfers import Shelved
from penstock.training.checkpoint.header import Header, dtype_named

_KEY = "penstock"
_NAME = re.compile(r"stage-(\d+)(?:\.part-(\d+))?\.safetensors")


def piece_name(stage: int, part: int = 0, num_parts: int = 1) -> str:
    """The name of a piece's file.

    >>> piece_name(2), piece_name(2, 0, 4)
    ('stage-2.safetensors', 'stage-2.part-0.safetensors')
    """
    return f"stage-{stage}{f'.part-{part}' if num_parts > 1 else ''}.safetensors"


def is_piece_name(name: str) -> bool:
    """Whether a file may be a piece, by its name."""
    return _NAME.fullmatch(name) is not None


def apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as safetensors takes them: dense, in main memory, none in the memory of another."""
    apart: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        dense = tensor.detach().cpu().contiguous()
        address = dense.untyped_storage().data_ptr()
        shares = address in seen or dense.untyped_storage().nbytes() != dense.nbytes
        apart[name] = dense.clone() if shares else dense
        seen.add(address)
    return apart


def write_piece(folder: Path, header: Header, tensors: Mapping[str, Tensor | Shelved]) -> Path:
    """Write a piece into the folder of its checkpoint, which is made if need be.

    Args:
        folder: the checkpoint's.
        header: its ``tensors`` say where these lie in the whole ones.
        tensors: in main memory, none sharing memory with another, or on a tier.

    Returns:
        The file.

    Raises:
        FileError: it cannot be written.
    """
    path = folder / piece_name(header.stage, header.part, header.num_parts)
    write_tensors(path, tensors, {_KEY: header.text()})
    return path


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor | Shelved], metadata: dict[str, str]
) -> None:
    """Write a safetensors file and its folder, so that whoever sees it sees all of it.

    Raises:
        FileError: it cannot be written; what was there before is there still.
    """
    with _replaced(path) as beside:
        # [1]
        in_memory = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
        if len(in_memory) == len(tensors):
            save_file(in_memory, beside, metadata=metadata)
        else:
            save_streamed(tensors, beside, metadata)


@contextmanager
def _replaced(path: Path) -> Iterator[Path]:
    """Within, a file beside ``path`` is written; then it takes its place, at once and whole."""
    beside = path.with_name(f".{path.name}.partial")
    with _refused(path, "write"):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            mode = _usual_mode(beside)
            yield beside
            beside.chmod(mode)
            flush(beside)  # [2]
            os.replace(beside, path)  # [3]
        except BaseException:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
            raise
        flush(path.parent)
        flush(path.parent.parent)


def _usual_mode(path: Path) -> int:
    """The rights of a file that the system makes there, which safetensors would not give it."""
    path.unlink(missing_ok=True)
    path.touch(exist_ok=False)
    return stat.S_IMODE(path.stat().st_mode)


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _refused(path: Path, doing: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FileError(f"cannot {doing} {path}: {error.strerror or error}") from None
    except KeyError as error:
        raise FileError(f"cannot {doing} {path}: safetensors has no room for {error}") from None
    except (SafetensorError, RuntimeError, ValueError) as error:
        raise FileError(f"cannot {doing} {path}: {error}") from None


@dataclass(frozen=True)
class CheckpointPiece:
    """A file of a checkpoint, of which the head was read."""

    path: Path
    header: Header

    @classmethod
    def opened(cls, path: Path) -> CheckpointPiece:
        """Read the head of a file.

        Raises:
            FileError: it cannot be read, is cut short, or its head is not that of a piece.
        """
        with _refused(path, "read"), safe_open(path, "pt") as file:
            text = (file.metadata() or {}).get(_KEY)
            names = set(file.keys())
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
        if text is None:
            raise FileError(f"{path} was not written by Penstock: it has no head of its own")
        header = Header.of_text(text, f"the head of {path}")
        said = {name: extent.own_shape for name, extent in header.tensors.items()}
        for name in sorted({*said, *shapes}):
            if said.get(name) != shapes.get(name):
                raise FileError(
                    f"{path}: its head gives {name!r} the shape {said.get(name)}, but the file has "
                    f"{shapes.get(name)}"
                )
        return cls(path, header)

    def read(self, name: str, start: Sequence[int], size: Sequence[int]) -> Tensor:
        """A part of a tensor of this piece, to be read only: its memory may be the file's.

        Args:
            name: the tensor's.
            start: where the part begins in the piece's tensor, for each dimension.
            size: its shape.

        Raises:
            FileError: the file has changed, or cannot be read.
        """
        extent = self.header.tensors[name]
        with _refused(self.path, "read"):
            if tuple(size) == extent.own_shape:
                tensor: Tensor = self._file.get_tensor(name)
            else:
                ranges = (slice(s, s + n) for s, n in zip(start, size, strict=True))
                tensor = self._file.get_slice(name)[tuple(ranges)]
        if str(tensor.dtype) != f"torch.{extent.dtype}" or tuple(tensor.shape) != tuple(size):
            raise FileError(f"{self.path}: {name!r} is not what the head of the file says")
        return tensor

    @cached_property
    def _file(self) -> Any:
        """Stays open: a head with many tensors takes long to read."""
        return safe_open(self.path, "pt")

    @property
    def num_bytes(self) -> int:
        """The size of the file."""
        return self.path.stat().st_size


def assembled(
    name: str, pieces: Sequence[CheckpointPiece], start: Sequence[int], size: Sequence[int]
) -> Tensor:
    """A part of a tensor that may lie in several pieces; only what is needed is read.

    Args:
        name: the tensor's.
        pieces: those that have some of it; where two overlap, they have the same.
        start: where the part begins in the whole tensor, for each dimension.
        size: its shape.

    Raises:
        FileError: no piece has some of it.
    """
    if 0 in size:
        return torch.empty(tuple(size), dtype=dtype_named(pieces[0].header.tensors[name].dtype))
    result, num_there = None, 0
    seen: set[tuple[tuple[int, int], ...]] = set()
    for piece in pieces:
        extent = piece.header.tensors[name]
        first = extent.start or (0,) * len(extent.shape)
        overlap = tuple(
            (max(a, b), min(a + n, b + m))
            for a, n, b, m in zip(first, extent.own_shape, start, size, strict=True)
        )
        if overlap in seen or any(low >= high for low, high in overlap):
            continue
        seen.add(overlap)
        counts = [high - low for low, high in overlap]
        within = [low - a for (low, _), a in zip(overlap, first, strict=True)]
        part = piece.read(name, within, counts)
        if tuple(counts) == tuple(size):
            return part
        if result is None:
            result = torch.empty(tuple(size), dtype=part.dtype)
        ranges = (slice(low - b, high - b) for (low, high), b in zip(overlap, start, strict=True))
        result[tuple(ranges)] = part
        num_there += part.numel()
    if result is None or num_there != result.numel():
        files = ", ".join(str(piece.path) for piece in pieces)
        raise FileError(f"{files} do not hold all of {name!r}")
    return result


_ALIGNED = 8
_BLOCK_BYTES = 1 << 22
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""The names of types in the format."""


class _Content(NamedTuple):
    """A tensor as a file has it.

    Attributes:
        dtype: the format's name of its type.
        shape, num_bytes, item_bytes: its sizes, and that of an element.
        blocks: gives its bytes.
    """

    dtype: str
    shape: Sequence[int]
    num_bytes: int
    item_bytes: int
    blocks: Callable[[], Iterator[memoryview | bytes]]


def save_streamed(
    tensors: Mapping[str, Tensor | Shelved], path: Path, metadata: Mapping[str, str]
) -> None:
    """Write a safetensors file.

    Args:
        tensors: by name; those in memory dense and in main memory.

    Raises:
        KeyError: the format has no name for a type.
        FileError, OSError: something could not be read or written.
    """
    contents = {
        name: _Content(
            _NAMES[tensor.dtype],
            tensor.shape,
            tensor.nbytes,
            tensor.dtype.itemsize,
            partial(_bytes_of, tensor),
        )
        for name, tensor in tensors.items()
    }
    _write_file(path, contents, metadata)


def _write_file(path: Path, contents: Mapping[str, _Content], metadata: Mapping[str, str]) -> None:
    # As torch's writer has them: the widest first, so that all are aligned.
    order = sorted(contents, key=lambda name: (-contents[name].item_bytes, name))
    head: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        dtype, shape, num_bytes, *_ = contents[name]
        begin, end = end, end + num_bytes
        head[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNED)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.writelines(contents[name].blocks())


def join_files(paths: Sequence[Path], path: Path, metadata: Mapping[str, str]) -> None:
    """Write what several safetensors files have into one, in little memory, and remove them.

    Raises:
        FileError: one cannot be read or removed, or the new one not be written.
    """
    with _replaced(path) as beside:
        contents = {name: content for part in paths for name, content in _stored_in(part)}
        _write_file(beside, contents, metadata)
    for part in paths:
        with _refused(part, "remove"):
            part.unlink()


def _stored_in(path: Path) -> Iterator[tuple[str, _Content]]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        head = json.loads(file.read(length))
    head.pop("__metadata__", None)
    for name, entry in head.items():
        begin, end = entry["data_offsets"]
        num_bytes, shape = end - begin, entry["shape"]
        item_bytes = num_bytes // max(prod(shape), 1)
        blocks = partial(_blocks, path, 8 + length + begin, num_bytes)
        yield name, _Content(entry["dtype"], shape, num_bytes, item_bytes, blocks)


def _blocks(path: Path, offset: int, num_bytes: int) -> Iterator[bytes]:
    with path.open("rb") as source:
        source.seek(offset)
        while num_bytes and (block := source.read(min(num_bytes, _BLOCK_BYTES))):
            yield block
            num_bytes -= len(block)


def _bytes_of(tensor: Tensor | Shelved) -> Iterator[memoryview]:
    if isinstance(tensor, Shelved):
        if tensor.is_contiguous:
            yield from tensor.pieces()
            return
        tensor = tensor.tensor()
    yield tensor.reshape(-1).view(torch.uint8).numpy().data
