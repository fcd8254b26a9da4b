"""The inputs of a traced model: spread over its arguments, checked at its border, said in files.

An ``Example`` is how a file says the inputs that a model was captured with; they are made again
from it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from penstock.base.errors import InputError
from penstock.core.example import Dynamic, Example, Granularity
from penstock.engine.model import tree

_SEED = 0

Given = tuple[tuple[Any, ...], dict[str, Any]]


def spread(signature: inspect.Signature, inputs: Any) -> Given:
    """The (args, kwargs) with which ``forward`` is called for the inputs of a pipeline.

    A tuple is spread over the arguments of ``forward``, a dictionary over its keywords, if they
    fit; everything else, and what does not fit, is one argument.
    """
    tries: list[Given] = [((inputs,), {})]
    if isinstance(inputs, tuple):
        tries.insert(0, (inputs, {}))
    elif isinstance(inputs, dict) and all(isinstance(key, str) for key in inputs):
        tries.insert(0, ((), _as_declared(signature, inputs)))
    for args, kwargs in tries:
        try:
            signature.bind(*args, **kwargs)
        except TypeError:
            continue
        return args, kwargs
    raise InputError(
        f"forward{signature} cannot be called with these inputs{_misfits(signature, inputs)}; give "
        "a tuple with its arguments, or a dictionary with its keywords"
    )


def _misfits(signature: inspect.Signature, inputs: Any) -> str:
    """Which keywords are too many or too few, if the inputs are a dictionary."""
    if not isinstance(inputs, dict):
        return ""
    parameters = signature.parameters.values()
    named = [
        parameter
        for parameter in parameters
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    extra = [repr(key) for key in inputs if key not in {parameter.name for parameter in named}]
    missing = [
        repr(parameter.name)
        for parameter in named
        if parameter.default is parameter.empty and parameter.name not in inputs
    ]
    wrong = [f"it takes no {' and no '.join(extra)}"] if extra else []
    wrong += [f"it needs {' and '.join(missing)}, too"] if missing else []
    if extra == ["'labels'"]:
        wrong.append("with loss=pk.model_loss, a model must take its labels")
    return f": {'; '.join(wrong)}" if wrong else ""


def _as_declared(signature: inspect.Signature, inputs: dict[str, Any]) -> dict[str, Any]:
    """Put keywords in the order in which ``forward`` declares them."""
    own = [name for name in signature.parameters if name in inputs]
    return {name: inputs[name] for name in (*own, *sorted(inputs.keys() - {*own}))}


@dataclass(frozen=True)
class Borders:
    """How the model is called and what it returns, for its first and last layer.

    Attributes:
        signature: the signature of the model's ``forward``.
        structure: the structure of ``(args, kwargs)``.
        leaves: their leaves: a ``InputShape`` for each tensor, and all other values themselves.
        guards: what checks the shapes of inputs, by whether the model is training.
        outputs: the structure of what the model returns, by whether it is training.
    """

    signature: inspect.Signature
    structure: tree.Structure
    leaves: tuple[Any, ...]
    guards: Mapping[bool, Callable[..., Any] | None]
    outputs: Mapping[bool, tree.Structure]

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def flat(self, inputs: Any, training: bool) -> list[Any]:
        """The leaves of the inputs.

        Raises:
            InputError: they are not like those that the model was captured with.
        """
        leaves, structure = tree.flatten(spread(self.signature, inputs))
        if structure != self.structure:
            leaves, structure = self._by_name(inputs) or (leaves, structure)
        if structure != self.structure:
            raise self._other_form(inputs, structure)
        for position, (leaf, expected) in enumerate(zip(leaves, self.leaves, strict=True)):
            if not _fits(leaf, expected):
                given = tuple(leaf.shape) if isinstance(leaf, Tensor) else repr(leaf)
                raise InputError(
                    f"input {position} is {given}, but the model was captured with "
                    f"{_text(expected)}; capture it with dynamic='all' for other lengths, or with "
                    "these inputs"
                )
        guards = self.guards[training]
        if guards is not None:
            _ask(guards, leaves)
        return leaves

    def _other_form(self, inputs: Any, structure: tree.Structure) -> InputError:
        """The error for inputs not nested like those of the capture; it names what differs."""
        args, kwargs = tree.unflatten(list(self.leaves), self.structure)
        expected = [*self.signature.bind(*args, **kwargs).arguments]
        given = self._names(inputs) or expected
        extra = [name for name in given if name not in expected]
        missing = [name for name in expected if name not in given]
        if not extra and not missing:
            return InputError(
                f"the inputs are nested as {_flat(structure)}, but the model was captured with "
                f"{_flat(self.structure)}; give them in that form, or capture the model with these"
            )
        if extra and not isinstance(inputs, dict):  # which names the values got says nothing
            return InputError(
                f"the inputs are a tuple of {len(given)}, but the model was captured with "
                f"{', '.join(expected)} alone; if targets are in it, give them apart, as in "
                "step(inputs, targets) and evaluate(inputs), or else capture the model with such "
                "inputs"
            )
        advice = [f"leave out {' and '.join(extra)}"] if extra else []
        advice += [f"give {' and '.join(missing)} too"] if missing else []
        return InputError(
            f"the inputs are {', '.join(given)}, but the model was captured with "
            f"{', '.join(expected)}; {' and '.join(advice)}, or capture the model with such inputs"
        )

    def _by_name(self, inputs: Any) -> tuple[list[Any], tree.Structure] | None:
        """Inputs with the names of those of the capture, in the form that these had there: by
        place or by name; ``None`` if they have others."""
        own_args, own_kwargs = tree.unflatten(list(self.leaves), self.structure)
        by_place = [*self.signature.bind_partial(*own_args).arguments]
        args, kwargs = spread(self.signature, inputs)
        named = self.signature.bind(*args, **kwargs).arguments
        if sorted(named) != sorted((*by_place, *own_kwargs)):
            return None
        in_form = (
            tuple(named[name] for name in by_place),
            {name: named[name] for name in own_kwargs},
        )
        return tree.flatten(in_form)

    def _names(self, inputs: Any) -> list[str]:
        if isinstance(inputs, dict):
            return [*map(str, inputs)]
        args, kwargs = spread(self.signature, inputs)
        return [*self.signature.bind(*args, **kwargs).arguments]


class InputShape(tuple[int | None, ...]):
    """The shape of a tensor; ``None`` where it may differ."""


def _fits(leaf: Any, expected: Any) -> bool:
    if not isinstance(expected, InputShape):
        return not isinstance(leaf, Tensor) and bool(leaf == expected)
    if not isinstance(leaf, Tensor) or leaf.dim() != len(expected):
        return False
    pairs = zip(leaf.shape, expected, strict=True)
    return all(wanted is None or size == wanted for size, wanted in pairs)


def _flat(structure: tree.Structure) -> str:
    return " ".join(str(structure).split())


def _text(expected: Any) -> str:
    if not isinstance(expected, InputShape):
        return repr(expected)
    return "(" + ", ".join("any" if size is None else str(size) for size in expected) + ")"


def _ask(guards: Callable[..., Any], leaves: list[Any]) -> None:
    try:
        guards(*leaves)
    except (AssertionError, RuntimeError) as error:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tree.tensors(leaves))
        said = " ".join(str(error).split())[:200]
        raise InputError(
            f"inputs of shape {shapes} do not fit what the model was captured for: {said}; "
            "capture it with inputs of such shapes"
        ) from error


def borders_of(
    signature: inspect.Signature,
    given: Given,
    dynamic: Dynamic,
    guards: Mapping[bool, Callable[..., Any] | None],
    outputs: Mapping[bool, tree.Structure],
) -> Borders:
    """The borders of a model that was traced with some inputs.

    Args:
        dynamic: which sizes of the inputs may differ.
        guards, outputs: as of ``Borders``.
    """
    leaves, structure = tree.flatten(given)
    fixed = 1 if dynamic == "rows" else None
    expected = tuple(_expected(leaf, fixed) for leaf in leaves)
    return Borders(signature, structure, expected, guards, outputs)


def _expected(leaf: Any, fixed: int | None) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return InputShape(
        None if fixed is None or dimension < fixed else size
        for dimension, size in enumerate(leaf.shape)
    )


def described(inputs: Any, granularity: Granularity, dynamic: Dynamic) -> Example | None:
    """How a model is captured, for files; ``None`` if its inputs hold something that files do not
    have."""
    try:
        return Example(inputs=_written(inputs), granularity=granularity, dynamic=dynamic)
    except InputError:
        return None


def _written(part: Any) -> Any:
    if isinstance(part, Tensor):
        first = part.detach().flatten()[:1]
        known = first.numel() and not first.is_complex() and not first.is_meta
        value = first.item() if known else 0
        # What is no number in JSON, such as the infinity of a mask, is as good as another.
        value = value if value - value == 0 else 0
        return {"tensor": str(part.dtype)[6:], "shape": [*part.shape], "value": value}
    if type(part) is tuple:
        return {"tuple": [_written(inner) for inner in part]}
    if type(part) is list:
        return [_written(inner) for inner in part]
    if isinstance(part, dict) and all(type(key) is str for key in part):
        return {"dict": {key: _written(inner) for key, inner in part.items()}}
    if part is None or type(part) in (bool, int, float, str):
        return part
    raise InputError("a file has no such input")


def inputs_like(example: Example, device: torch.device | None) -> Any:
    """Inputs of the same form: tensors of numbers have one value everywhere, which the model has
    seen; floating ones are drawn, always the same.

    Raises:
        InputError: torch has no such dtype.
    """
    draws = torch.Generator().manual_seed(_SEED)

    def made(part: Any) -> Any:
        match part:
            case {"tensor": name, "shape": shape, "value": value}:
                dtype = getattr(torch, name, None)
                if not isinstance(dtype, torch.dtype):
                    raise InputError(f"example: torch has no dtype {name!r}")
                if dtype.is_floating_point:
                    tensor = torch.randn(shape, generator=draws).to(dtype)
                else:
                    tensor = torch.full(shape, value, dtype=dtype)
                return tensor.to(device)
            case {"tuple": parts}:
                return tuple(map(made, parts))
            case {"dict": entries}:
                return {key: made(inner) for key, inner in entries.items()}
            case list():
                return [made(inner) for inner in part]
        return part

    return made(example.inputs)
