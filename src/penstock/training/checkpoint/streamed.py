"""Safetensors files from tensors that are never in memory as a whole.

The format is a head in JSON and the bytes of all tensors, one behind the other; its own writer
wants all of them at once. Whoever reads the files sees no difference.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from penstock.engine.weights.transfers import Shelved

_ALIGNED = 8
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""What the format calls types."""


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
    # As torch's writer has them: the widest first, so that all are aligned.
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    head: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        tensor, begin = tensors[name], end
        end += tensor.nbytes
        offsets = [begin, end]
        head[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
    text = json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNED)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            for piece in _bytes_of(tensors[name]):
                file.write(piece)


def _bytes_of(tensor: Tensor | Shelved) -> Iterator[memoryview]:
    if isinstance(tensor, Shelved):
        if tensor.is_contiguous:
            yield from tensor.pieces()
            return
        tensor = tensor.tensor()
    yield tensor.reshape(-1).view(torch.uint8).numpy().data
