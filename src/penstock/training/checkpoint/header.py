"""The head of a piece: everything that is no tensor, as strict JSON that gives back the same value.

JSON knows no tuples, no infinities and only text as keys: ``MultiStepLR`` counts milestones in a
``Counter`` by whole numbers, which would come back as text. These are written as an object with a
single key that begins with ``$``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import torch
from msgspec import field
from torch import Tensor

from penstock.base.errors import FileError, InputError
from penstock.base.values import MOST_BYTES, Value, is_number, is_whole, shown
from penstock.engine.weights.transfers import Shelved

FORMAT = 1


class TensorExtent(Value, frozen=True, kw_only=True, array_like=True):
    """Where a tensor of a piece lies in the whole one.

    Attributes:
        dtype: the type of its numbers, such as ``"float32"``.
        shape: of the whole tensor.
        start: for each dimension, where this piece begins; empty if this is all of it.
        size: for each dimension, how much of it there is here; empty if this is all of it.
    """

    dtype: str
    shape: tuple[int, ...]
    start: tuple[int, ...] = ()
    size: tuple[int, ...] = ()

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The shape of the tensor in the piece."""
        return self.size or self.shape

    def __post_init__(self) -> None:
        if not self.start and not self.size:
            return
        dimensions = zip(self.shape, self.start, self.size, strict=True)
        try:
            fits = all(first >= 0 and first + count <= most for most, first, count in dimensions)
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(
                f"a part that begins at {self.start} and has the shape {self.size} does not lie in "
                f"a tensor of shape {self.shape}"
            )


def extent_of(tensor: Tensor | Shelved) -> TensorExtent:
    """The extent of a tensor that a piece has all of."""
    return TensorExtent(dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))


class Identity(Value, frozen=True, kw_only=True):
    """Which checkpoint a piece belongs to. All of its pieces have an equal one.

    Attributes:
        format: the version of the format.
        run: what goes on from a checkpoint has the name of the run that wrote it.
        attempt: the pipeline that wrote it, which is another one after each restart.
        generation: how many pipelines wrote into the run's folder before that one. What a later one
            wrote is newer, whatever its step: somebody may have gone back.
        step: how many minibatches were trained on.
        num_stages: how many stages its plan has.
        plan: digest of the plan.
        seed: of all random layers.
        position: where the run was in its data, as the caller gave it.
        scaler: the state of the loss scaler; empty without one.
    """

    format: int
    run: str
    attempt: str
    generation: int
    step: int
    num_stages: int
    plan: str
    seed: int
    position: Any = None
    scaler: dict[str, int | float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("generation", "step", "num_stages"):
            if not 0 <= getattr(self, name) <= MOST_BYTES:
                raise ValueError(f"{name} is {getattr(self, name)}")
        if self.scaler and self.scaler.keys() != torch.amp.GradScaler("cpu").state_dict().keys():
            raise ValueError(f"scaler has the keys {sorted(self.scaler)}")


class Optimizing(Value, frozen=True, kw_only=True):
    """The optimizer of a stage, but for its tensors.

    Attributes:
        kind: the name of its class.
        rate: what its learning rates were multiplied by when it was made.
        options: those of each parameter, by the parameter's name.
        state: what each parameter has that is no tensor, by the parameter's name.
        scheduler: the state of the learning-rate scheduler.
        num_lowered: how many updates had a lowered rate (PipeMare's T1).
    """

    kind: str
    rate: float
    options: dict[str, dict[str, Any]]
    state: dict[str, dict[str, Any]]
    scheduler: dict[str, Any] | None = None
    num_lowered: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.rate < math.inf or self.num_lowered < 0:
            raise ValueError(f"rate is {self.rate}, num_lowered {self.num_lowered}")


class UnderWay(Value, frozen=True, kw_only=True):
    """Gradients that one rank had sent to another when a live stream was saved, and that the other
    had not taken yet.

    Attributes:
        source, target: the ranks.
        tag: which of the ways between them it was.
        unit: the frame that they are of.
        gradients: the name of each one's tensor; ``None`` where nothing flows back.
    """

    source: int
    target: int
    tag: int
    unit: int
    gradients: tuple[str | None, ...]

    def __post_init__(self) -> None:
        if min(self.source, self.target, self.tag, self.unit) < 0:
            raise ValueError(f"{self} has a negative number")


class Header(Value, frozen=True, kw_only=True):
    """The head of one piece.

    Attributes:
        identity: of its checkpoint.
        stage: the number of the stage.
        part: which part of the stage's state it is.
        num_parts: how many parts there are.
        tensors: where each tensor of the file lies in the whole one.
        extra: entries of the stage's ``state_dict`` that are no tensors.
        optimizing: the stage's optimizer; ``None`` if it has none.
        under_way: gradients on their way from this stage, where a live stream was saved.
    """

    identity: Identity
    stage: int
    part: int = 0
    num_parts: int = 1
    tensors: dict[str, TensorExtent]
    extra: dict[str, Any] = field(default_factory=dict)
    optimizing: Optimizing | None = None
    under_way: tuple[UnderWay, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.part < self.num_parts:
            raise ValueError(f"part is {self.part} of {self.num_parts}")

    def text(self) -> str:
        """As one line of JSON."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def of_text(cls, text: str, where: str) -> Header:
        """Read back what ``text`` wrote.

        Raises:
            FileError: it is no header, or of a version that this one does not know.
        """
        header = cls.from_json(text, where)
        version = header.identity.format
        if version != FORMAT:
            raise FileError(f"{where} has format {version}; this Penstock reads format {FORMAT}")
        return header


_TUPLE, _MAP, _COUNTER, _FLOAT, _TENSOR = "$tuple", "$map", "$counter", "$float", "$tensor"
_MOST_NUMBERS = 64


def to_json(value: Any, whose: str) -> Any:
    """A value as one that JSON gives back unchanged, by ``of_json``.

    Args:
        value: numbers, texts, ``None`` and tensors with a few numbers, in lists, tuples,
            dictionaries and counters.
        whose: names the value in errors.

    Raises:
        InputError: it is something else.

    >>> of_json(to_json({"betas": (0.9, 0.999), 3: float("inf")}, "a group"))
    {'betas': (0.9, 0.999), 3: inf}
    """
    try:
        return _as_json(value, whose)
    except RecursionError:
        raise InputError(f"{whose} is nested too deeply for a checkpoint") from None
    except UnicodeEncodeError:
        raise InputError(f"{whose} has a text in it that is no Unicode") from None


def _as_json(value: Any, whose: str) -> Any:
    if isinstance(value, str):
        value.encode()
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Tensor) and value.numel() <= _MOST_NUMBERS and not value.is_complex():
        dtype = str(value.dtype).removeprefix("torch.")
        return {_TENSOR: [dtype, _as_json(value.tolist(), whose)]}
    if is_number(value):
        return _number(value)
    if type(value) in (list, tuple):
        items = [_as_json(item, whose) for item in value]
        return items if type(value) is list else {_TUPLE: items}
    if type(value) in (dict, Counter):
        pairs = [[_as_json(key, whose), _as_json(item, whose)] for key, item in value.items()]
        is_plain = all(type(key) is str and not key.startswith("$") for key in value)
        if type(value) is dict:
            return dict(pairs) if is_plain else {_MAP: pairs}
        return {_COUNTER: pairs}
    raise InputError(
        f"{whose} is {shown(value)}, of type {type(value).__name__}; here a checkpoint holds "
        f"numbers, texts and tensors of at most {_MOST_NUMBERS} numbers, and these in lists, "
        "tuples and dictionaries"
    )


def _number(value: Any) -> Any:
    if is_whole(value):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else {_FLOAT: repr(number)}


def of_json(value: Any) -> Any:
    """Give back the value that ``to_json`` was given.

    Raises:
        FileError: it is nothing that ``to_json`` writes.
    """
    try:
        return _restored(value)
    except RecursionError:
        raise FileError("a value of a checkpoint is nested too deeply") from None


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return [_restored(item) for item in value]
    if not isinstance(value, dict):
        return value
    if not any(key.startswith("$") for key in value):
        return {key: _restored(item) for key, item in value.items()}
    with suppress(TypeError, ValueError, KeyError, RuntimeError):
        ((mark, content),) = value.items()
        return _MARKED[mark](content)
    raise FileError(f"{shown(value)} is no value that a checkpoint holds")


def _map_of(pairs: Any) -> dict[Any, Any]:
    return {_restored(key): _restored(item) for key, item in pairs}


def _tensor_of(content: Any) -> Tensor:
    dtype, numbers = content
    return torch.tensor(_restored(numbers), dtype=dtype_named(dtype))


_MARKED: dict[str, Callable[[Any], Any]] = {
    _TUPLE: lambda items: tuple(_restored(list(items))),
    _MAP: _map_of,
    _COUNTER: lambda pairs: Counter(_map_of(pairs)),
    _FLOAT: {repr(number): number for number in (math.inf, -math.inf, math.nan)}.__getitem__,
    _TENSOR: _tensor_of,
}


def dtype_named(name: Any) -> torch.dtype:
    """torch's type of numbers with this name, such as ``"float32"``.

    Raises:
        FileError: there is none.
    """
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise FileError(f"{shown(name)} is no type of numbers")
    return dtype
