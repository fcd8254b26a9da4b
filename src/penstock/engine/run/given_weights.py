"""Initial values from files: layer by layer, so that no more than one layer is read at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.base.errors import FileError, InputError
from penstock.engine.model.spine import NamedLayer
from penstock.engine.run.materialising import emptied

_MOST_NAMED = 3


class GivenWeights:
    """Gives layers the values that safetensors files have under the model's own keys.

    Args:
        layers: of the whole model.
        path: a file, or a folder with several that together have all keys.

    Raises:
        FileError: a file cannot be read, or has other keys, types or shapes than the model.
        InputError: the path is none.
    """

    def __init__(self, layers: Sequence[NamedLayer], path: str | os.PathLike[str]) -> None:
        if not isinstance(path, str | os.PathLike):
            raise InputError(
                "initial_weights must be the path of a safetensors file, or of a folder"
            )
        self._layers = layers
        self._path = Path(path)
        self._file_of: dict[str, Path] = {}
        for file in self._files():
            with _opened(file) as content:
                for key in content.keys():  # noqa: SIM118 - it is no dictionary
                    if self._file_of.setdefault(key, file) is not file:
                        raise FileError(f"{file} and {self._file_of[key]} both have {key!r}")
        wanted = {place.key for layer in layers for place in _places(layer)}
        for what, keys in (
            ("lacks", wanted - self._file_of.keys()),
            ("has, beside the model's,", self._file_of.keys() - wanted),
        ):
            if keys:
                some = ", ".join(map(repr, sorted(keys)[:_MOST_NAMED]))
                more = f" and {len(keys) - _MOST_NAMED} more" if len(keys) > _MOST_NAMED else ""
                raise FileError(
                    f"{self._path} is of another model: it {what} {some}{more}; give the weights "
                    "of this one, saved from its state_dict()"
                )

    def _files(self) -> list[Path]:
        files = [self._path]
        if self._path.is_dir():
            files = sorted(self._path.glob("*.safetensors"))
        if not files:
            raise FileError(f"{self._path} has no safetensors files; give a file, or their folder")
        return files

    def draw(self, index: int) -> bool:
        """Give a layer its values.

        Args:
            index: the layer's number in the model.

        Returns:
            Whether there was anything to do.

        Raises:
            FileError: a value has another type or shape.
        """
        places = list(_places(self._layers[index]))
        for file in sorted({self._file_of[place.key] for place in places}):
            with _opened(file) as content, torch.no_grad():
                for place in places:
                    if self._file_of[place.key] == file:
                        self._give(place, content.get_tensor(place.key))
        return bool(places)

    def _give(self, place: _Place, value: Tensor) -> None:
        key, tensor = place.key, place.tensor
        if (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
            raise FileError(
                f"{self._file_of[key]} has {key!r} as {value.dtype} of shape "
                f"{tuple(value.shape)}, and the model as {tensor.dtype} of shape "
                f"{tuple(tensor.shape)}"
            )
        emptied(tensor).copy_(value)


class _Place(NamedTuple):
    """Something that a state_dict has, and its key in the model."""

    key: str
    tensor: Tensor


def _places(layer: NamedLayer) -> Iterator[_Place]:
    for prefix, module in layer.module.named_modules(remove_duplicate=False):
        hidden = module._non_persistent_buffers_set
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None and name not in hidden:
                    key = layer.key(f"{prefix}.{name}" if prefix else name)
                    yield _Place(key, tensor)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, "pt") as content:
            yield content
    except (OSError, SafetensorError) as error:
        raise FileError(f"cannot read the weights in {file}: {error}") from None
