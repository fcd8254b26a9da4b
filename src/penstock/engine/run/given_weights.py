"""Initial values from files: layer by layer, so that no more than one layer is read at a time.

The files may be those of ``save_pretrained`` in transformers: an index says which file has what,
tied weights are there once, and buffers that are not persistent are not there at all. So a process
opens those files only that have something of its stages, a tied weight is found under any of its
names, and such buffers are computed as the model says.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from penstock.base.errors import FileError, InputError, ModelError
from penstock.base.values import decoded, read_text, refused_as
from penstock.engine.model.spine import NamedLayer
from penstock.engine.run.materialising import emptied, reset_of

_MOST_BUFFERS_NAMED = 3
_REMEDY = (
    "no file has their values; give {kind} a reset_parameters() that sets them, register them as "
    "persistent, or build the model on the CPU"
)


class _BufferOwner(NamedTuple):
    """The module of the model that holds a buffer, and its name in the model."""

    path: str
    module: nn.Module


class Unstored:
    """Computes buffers on ``meta`` that are not persistent, layer by layer.

    No state_dict has them, since the model's code computes them: the frequencies of rotary
    embeddings, the numbers of positions. On ``meta`` that computing has come to nothing, so it is
    done again, by the ``reset_parameters`` of the module that holds them, or by the
    ``_init_weights`` of a model of transformers. It is done to a copy, from two different
    beginnings: what differs then, nobody has set.

    Args:
        model: the whole one, as the user has it.
        layers: of the whole model.

    Raises:
        ModelError: nothing says what something on ``meta`` should be.
    """

    def __init__(self, model: nn.Module, layers: Sequence[NamedLayer]) -> None:
        init: object = getattr(model, "_init_weights", None)
        self._init: Callable[[nn.Module], Any] | None = init if callable(init) else None
        self._owner_of = {
            id(buffer): _BufferOwner(path, module)
            for path, module in model.named_modules()
            for buffer in module._buffers.values()
            if buffer is not None
        }
        for layer in layers:
            _check_no_strays(layer)
            for _, buffer in _hidden(layer):
                owner = self._owner_of[id(buffer)]
                if self._init is None and reset_of(owner.module) is None:
                    raise _nobody_sets(owner)

    def compute(self, layer: NamedLayer) -> bool:
        """Give the buffers of a layer their values; whether there was anything to do.

        Raises:
            ModelError: what should set them leaves some out.
        """
        hidden = [buffer for _, buffer in _hidden(layer)]
        for buffer in hidden:
            owner = self._owner_of[id(buffer)]
            name = next(key for key, own in owner.module._buffers.items() if own is buffer)
            first, second = (self._computed(owner, name, fill) for fill in (0, 1))
            if first.shape != buffer.shape or not torch.equal(first, second):
                raise _nobody_sets(owner)
            emptied(buffer).copy_(first)
        return bool(hidden)

    def _computed(self, owner: _BufferOwner, name: str, fill: int) -> Tensor:
        """A buffer as the model's code computes it, if it had other values before."""
        begun = {
            id(buffer): torch.full_like(buffer, fill, device="cpu")
            if key in owner.module._non_persistent_buffers_set
            else torch.empty_like(buffer, device="meta")
            for key, buffer in owner.module._buffers.items()
            if buffer is not None
        }
        # A copy, or what is set beside the buffer would overwrite what files have given already.
        nothing: dict[int, Any] = {
            id(own): nn.Parameter(torch.empty_like(own, device="meta"), own.requires_grad)
            for own in owner.module.parameters()
        }
        copied = copy.deepcopy(owner.module, nothing | begun)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)  # the same on every process
            reset = reset_of(copied)
            if reset is not None:
                reset()
            elif self._init is not None:
                self._init(copied)
        value = copied._buffers[name]
        if value is None or value.is_meta:
            raise _nobody_sets(owner)
        return value


def _hidden(layer: NamedLayer) -> Iterator[tuple[str, Tensor]]:
    """The buffers of a layer that no state_dict has, and that are on ``meta``."""
    for module in layer.module.modules():
        for name in sorted(module._non_persistent_buffers_set):
            buffer = module._buffers.get(name)
            if buffer is not None and buffer.is_meta:
                yield name, buffer


def _nobody_sets(owner: _BufferOwner) -> ModelError:
    hidden = owner.module._non_persistent_buffers_set
    names = [
        name
        for name, buffer in owner.module._buffers.items()
        if name in hidden and buffer is not None and buffer.is_meta
    ]
    some = ", ".join(
        repr(f"{owner.path}.{name}".lstrip(".")) for name in names[:_MOST_BUFFERS_NAMED]
    )
    kind = type(owner.module).__name__
    return ModelError(
        f"{some} of {kind} are on the meta device and not persistent, so "
        f"{_REMEDY.format(kind=kind)}"
    )


def _check_no_strays(layer: NamedLayer) -> None:
    """Raise ``ModelError`` for a tensor on ``meta`` that is neither parameter nor buffer: nobody
    can give it values."""
    module = layer.module
    held = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, Tensor) and value.is_meta and id(value) not in held:
                raise ModelError(
                    f"layer {layer.name!r} keeps {f'{path}.{name}'.lstrip('.')!r} as a tensor on "
                    "the meta device that is neither parameter nor buffer, so nothing can give it "
                    "values; register it as a buffer, make it in forward, or build the model on "
                    "the CPU"
                )


INDEX = "model.safetensors.index.json"
"""Says which file of a folder has what; transformers reads it too."""

_MOST_NAMED = 3


class Index(msgspec.Struct):
    """The index of a folder; others may write more into it.

    Attributes:
        weight_map: the file of each key, in the folder.
        metadata: what whoever wrote it had to say.
    """

    weight_map: dict[str, str]
    metadata: dict[str, Any] = {}


class StoredTensor(NamedTuple):
    """Something that a state_dict has, and its key in the model."""

    key: str
    tensor: Tensor


class GivenWeights:
    """Gives layers the values that safetensors files have under the model's own keys.

    Args:
        model: the whole one, as the user has it.
        layers: of the whole model.
        path: a file, or a folder with several that together have all keys; with an index, those
            that it names.

    Raises:
        FileError: a file cannot be read, or has other keys, types or shapes than the model.
        InputError: the path is none.
        ModelError: files do not have, and nothing says, what something on ``meta`` should be.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[NamedLayer], path: str | os.PathLike[str]
    ) -> None:
        if not isinstance(path, str | os.PathLike):
            raise InputError(
                "initial_weights must be the path of a safetensors file, or of a folder"
            )
        self._layers = layers
        self._path = Path(path)
        self._file_of = _files_by_key(self._path)
        model = getattr(model, "original", model)  # a captured one's keys are those of the model
        wanted = {place.key: place.tensor for layer in layers for place in places(layer)}
        known = {key: [key] for key in wanted}
        for names in names_by_tensor(model, wanted).values():
            known |= {key: names for key in names if key in wanted}
        self._name_of = self._found(model, known)
        self._unstored = Unstored(model, layers)

    def _found(self, model: nn.Module, known: Mapping[str, Sequence[str]]) -> dict[str, str]:
        """The name in the files of each of the model's keys.

        Args:
            known: by each key, the names of the same tensor, itself among them.
        """
        # What transformers calls the model without its head is saved without the model's name.
        base = f"{getattr(model, 'base_model_prefix', '')}."
        candidates = {
            key: [*names, *(name.removeprefix(base) for name in names)]
            for key, names in known.items()
        }
        name_of = {
            key: next((name for name in names if name in self._file_of), None)
            for key, names in candidates.items()
        }
        meant = {name for names in candidates.values() for name in names}
        # Older releases of transformers have saved what newer ones compute.
        old = [*map(re.compile, getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
        foreign = [
            name
            for name in self._file_of
            if name not in meant and not any(pattern.search(name) for pattern in old)
        ]
        for verb, keys in (
            ("lacks", [key for key, name in name_of.items() if name is None]),
            ("has, beside the model's,", foreign),
        ):
            if keys:
                some = ", ".join(map(repr, sorted(keys)[:_MOST_NAMED]))
                more = f" and {len(keys) - _MOST_NAMED} more" if len(keys) > _MOST_NAMED else ""
                raise FileError(
                    f"{self._path} is of another model: it {verb} {some}{more}; give the weights "
                    "of this one, saved from its state_dict()"
                )
        return {key: name for key, name in name_of.items() if name is not None}

    def draw(self, index: int) -> bool:
        """Give a layer its values.

        Args:
            index: the layer's number in the model.

        Returns:
            Whether there was anything to do.

        Raises:
            FileError: a value is not there, or has another type or shape.
            ModelError: the model does not say what a buffer is that no file has.
        """
        layer = self._layers[index]
        computed = self._unstored.compute(layer)
        stored = list(places(layer))
        for file in sorted({self._file_of[self._name_of[place.key]] for place in stored}):
            with _opened(file) as content, torch.no_grad():
                for place in stored:
                    name = self._name_of[place.key]
                    if self._file_of[name] == file:
                        self._give(place, name, content)
        return computed or bool(stored)

    def _give(self, place: StoredTensor, name: str, content: Any) -> None:
        key, tensor = place
        file = self._file_of[name]
        try:
            value: Tensor = content.get_tensor(name)
        except SafetensorError as error:
            raise FileError(
                f"{file} does not have {name!r}, which the index of its folder says is there "
                f"({error}); fetch that file again, or save the model again"
            ) from None
        if value.shape != tensor.shape or not _holds(tensor.dtype, value.dtype):
            remedy = (
                "give the weights of this model"
                if value.shape != tensor.shape
                else f"build the model in that type, as in model.to({value.dtype}), before it is "
                "profiled, or convert the files: not all of their numbers fit"
            )
            raise FileError(
                f"{file} has {name!r} as {value.dtype} of shape {tuple(value.shape)}, and the "
                f"model {key!r} as {tensor.dtype} of shape {tuple(tensor.shape)}; {remedy}"
            )
        emptied(tensor).copy_(value)


def places(layer: NamedLayer) -> Iterator[StoredTensor]:
    """The parameters and persistent buffers of a layer, under every name that it has for them."""
    for prefix, module in layer.module.named_modules(remove_duplicate=False):
        hidden = module._non_persistent_buffers_set
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None and name not in hidden:
                    key = layer.key(f"{prefix}.{name}" if prefix else name)
                    yield StoredTensor(key, tensor)


def names_by_tensor(model: nn.Module, keys: Mapping[str, Tensor]) -> dict[int, list[str]]:
    """All names of each tensor by its id, those of the model first and in its order.

    Args:
        model: tells names that no layer has.
        keys: those of layers.
    """
    names: dict[int, dict[str, None]] = {}
    wanted = {id(tensor) for tensor in keys.values()}
    own: Iterable[tuple[str, Tensor]] = model.named_parameters(remove_duplicate=False)
    for name, tensor in (*own, *model.named_buffers(remove_duplicate=False), *keys.items()):
        if id(tensor) in wanted:
            names.setdefault(id(tensor), {})[name] = None
    return {key: [*own] for key, own in names.items()}


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether a type has all numbers of another."""
    if wide == narrow or not (wide.is_floating_point and narrow.is_floating_point):
        return wide == narrow
    most, least = torch.finfo(wide), torch.finfo(narrow)
    return most.eps <= least.eps and most.max >= least.max and most.tiny <= least.tiny


def _files_by_key(path: Path) -> dict[str, Path]:
    """Where each key is."""
    index = path / INDEX
    if index.is_file():
        return _indexed(index)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise FileError(f"{path} has no safetensors files; give a file, or their folder")
    file_of: dict[str, Path] = {}
    for file in files:
        with _opened(file) as content:
            for key in content.keys():  # noqa: SIM118 - it is no dictionary
                if file_of.setdefault(key, file) is not file:
                    raise FileError(f"{file} and {file_of[key]} both have {key!r}")
    return file_of


def _indexed(index: Path) -> dict[str, Path]:
    """Where each key is, as an index says. Files are not opened: this process may need none of
    them, or its host may not have them."""
    remedy = "fetch it again, or save the model again"
    with refused_as(f"{index} is no index of weights; {remedy}"):
        weight_map = decoded(read_text(index), Index).weight_map
    for key, name in weight_map.items():
        if Path(name).name != name:
            raise FileError(
                f"{index} says that {key!r} is in {name!r}, which is no file of its folder; "
                f"{remedy}"
            )
    return {key: index.with_name(name) for key, name in weight_map.items()}


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, "pt") as content:
            yield content
    except (OSError, SafetensorError) as error:
        raise FileError(f"cannot read the weights in {file}: {error}") from None
