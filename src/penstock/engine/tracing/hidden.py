"""Modules with code that no graph can hold, which therefore stay whole: a router that looks at
values, a loop whose length is one.

Such a module is called as it is, and a stage may end before and behind it. What an export needs of
it are the shapes of what it returns. They cannot be had without values, so the model is run twice,
with other numbers of rows; a dimension of an output is that of an input which was as large both
times.
"""

from __future__ import annotations

import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.model import tree
from penstock.engine.model.experts import has_experts
from penstock.engine.tracing.exports import leaves_of
from penstock.engine.tracing.lines import because, causes_of, is_models, lines_of

_MOST_OF_THE_MODEL = 0.8
"""Share of the parameters: what is more than that leaves nothing to cut."""

Run = Callable[[int], None]
"""Runs the model on the inputs (0), or on another number of rows (1)."""


class UnseenShapesError(Exception):
    """The shapes that a module returns cannot be told from those that it is given."""


class Whole:
    """The modules of a model that stay whole when it is traced: those without children, and those
    whose code no tracer can follow.

    Args:
        model: the model.
        run: runs it, and leaves no trace of that.

    Attributes:
        modules: by name.
        hidden: names of those whose code cannot be followed, and the line that is why.
    """

    def __init__(self, model: nn.Module, run: Run) -> None:
        self.modules = leaves_of(model)
        self.hidden: dict[str, str] = {}
        self._model = model
        self._run = run

    @property
    def calm(self) -> list[nn.Module]:
        """All modules whose attributes are read when they are called, not when they are traced."""
        inside = (self.modules[name].modules() for name in self.hidden)
        return [*self.modules.values(), *chain.from_iterable(inside)]

    def hide_what_failed(self, error: Exception) -> bool:
        """Whether there is one module more that can stay whole, after an export failed."""
        name = _module_that_failed(self._model, error)
        if name is None or name in self.hidden:
            return False
        self.hidden[name] = because(lines_of(error)).removeprefix(", ")
        kept = {other: module for other, module in self.modules.items() if not _is_in(other, name)}
        self.modules = {**kept, name: self._model.get_submodule(name)}
        return True

    def seen(self) -> SeenCalls:
        """Calls of the hidden modules, in the model's mode.

        Raises:
            UnseenShapesError: that cannot be told.
        """
        return SeenCalls({name: self.modules[name] for name in self.hidden}, self._run)


def _is_in(name: str, outer: str) -> bool:
    return name == outer or name.startswith(f"{outer}.")


def _module_that_failed(model: nn.Module, error: BaseException) -> str | None:
    """The innermost module in whose code a trace has failed; ``None`` if that is the model itself,
    or so much of it that nothing would be left to cut."""
    names = {id(module): name for name, module in model.named_modules()}
    for cause in causes_of(error):
        met = [
            names[id(frame.f_locals["self"])]
            for frame, _ in traceback.walk_tb(cause.__traceback__)
            if is_models(frame) and id(frame.f_locals.get("self")) in names
        ]
        if met:
            return met[-1] if met[-1] and _leaves_enough(model, met[-1]) else None
    return None


def _leaves_enough(model: nn.Module, name: str) -> bool:
    whole = {id(parameter): parameter.numel() for parameter in model.parameters()}
    module = model.get_submodule(name)
    if has_experts(module):  # which copies can divide, whatever is left
        return True
    own = {id(parameter) for parameter in module.parameters()}
    return sum(whole[key] for key in own) <= _MOST_OF_THE_MODEL * sum(whole.values())


@dataclass(frozen=True)
class _Seen:
    """One call of a module: the leaves of what it was given, and of what it returned."""

    given: tuple[tuple[int, ...], ...]
    returned: tuple[Any, ...]
    structure: tree.Structure


@dataclass(frozen=True)
class _SizeRule:
    """A dimension of an output: the product of some dimensions of an input tensor."""

    tensor: int
    dimensions: tuple[int, ...]


class SeenCalls:
    """The shapes that modules returned when the model was run, and how they follow from what they
    were given.

    Args:
        modules: by name.
        run: runs the model.

    Raises:
        UnseenShapesError: a module is called more often with more rows, or returns shapes that do
            not follow from its inputs.
    """

    def __init__(self, modules: Mapping[str, nn.Module], run: Run) -> None:
        self._asked: Counter[str] = Counter()
        if not modules:
            return
        both = [_watched(modules, run, which) for which in (0, 1)]
        self._calls = {name: _paired(name, both[0][name], both[1][name]) for name in modules}

    def next_call(self, name: str) -> Callable[..., Any]:
        """A function that returns tensors without values, like those of the module's next call.

        Raises:
            UnseenShapesError: the module was never called.
        """
        calls = self._calls[name]
        if not calls:
            raise UnseenShapesError(f"{name} is called only while it is traced")
        # A tracer may run the model more than once.
        sizes, first = calls[self._asked[name] % len(calls)]
        self._asked[name] += 1
        return partial(_like, sizes, first)


Sizes = Sequence[int | _SizeRule]


def _like(sizes: Sequence[Sizes | None], seen: _Seen, *args: Any, **kwargs: Any) -> Any:
    tensors = tree.tensors((args, kwargs))

    def made(leaf: Any, own: Sizes | None) -> Any:
        if own is None:
            return leaf
        shape = [
            size
            if isinstance(size, int)
            else prod(tensors[size.tensor].shape[at] for at in size.dimensions)
            for size in own
        ]
        return tensors[0].new_empty(shape, dtype=leaf.dtype)

    leaves = [made(leaf, own) for leaf, own in zip(seen.returned, sizes, strict=True)]
    return tree.unflatten(leaves, seen.structure)


def _watched(modules: Mapping[str, nn.Module], run: Run, which: int) -> dict[str, list[_Seen]]:
    seen: dict[str, list[_Seen]] = defaultdict(list)

    def noting(name: str) -> Callable[..., None]:
        def note(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            shapes = tuple(tuple(tensor.shape) for tensor in tree.tensors((args, kwargs)))
            leaves, structure = tree.flatten(output)
            kept = (
                torch.empty_like(leaf, device="meta") if isinstance(leaf, Tensor) else leaf
                for leaf in leaves
            )
            seen[name].append(_Seen(shapes, tuple(kept), structure))

        return note

    with ExitStack() as hooks:
        for name, module in modules.items():
            handle = module.register_forward_hook(noting(name), with_kwargs=True)
            hooks.callback(handle.remove)
        run(which)
    return seen


def _paired(
    name: str, first: Sequence[_Seen], second: Sequence[_Seen]
) -> list[tuple[list[Sizes | None], _Seen]]:
    """For each call, how the dimensions of each output follow; ``None`` for what is no tensor."""
    if len(first) != len(second):
        raise UnseenShapesError(
            f"{name} is called {len(first)} times, and with other rows {len(second)}"
        )
    return [
        ([*_outputs(name, ours, theirs)], ours) for ours, theirs in zip(first, second, strict=True)
    ]


def _outputs(name: str, ours: _Seen, theirs: _Seen) -> Iterable[Sizes | None]:
    if ours.structure != theirs.structure:
        raise UnseenShapesError(f"{name} returns something else with other rows")
    for leaf, other in zip(ours.returned, theirs.returned, strict=True):
        if not isinstance(leaf, Tensor):
            if leaf != other:
                raise UnseenShapesError(f"{name} returns {leaf!r}, and with other rows {other!r}")
            yield None
            continue
        if not isinstance(other, Tensor) or leaf.dim() != other.dim():
            raise UnseenShapesError(f"{name} returns other dimensions with other rows")
        yield [
            _size(name, place, pair, ours.given, theirs.given)
            for place, pair in enumerate(zip(leaf.shape, other.shape, strict=True))
        ]


def _size(
    name: str,
    place: int,
    pair: tuple[int, int],
    ours: Sequence[tuple[int, ...]],
    theirs: Sequence[tuple[int, ...]],
) -> int | _SizeRule:
    """How one dimension of an output follows from the inputs: an input's dimension in the same
    place, rather than another of its dimensions, rather than two of them together."""
    for wanted in ((place,), None):
        for tensor, shapes in enumerate(zip(ours, theirs, strict=True)):
            count = min(map(len, shapes))
            singles = [(at,) for at in range(count)] + [(at, at + 1) for at in range(count - 1)]
            for dimensions in [wanted] if wanted else singles:
                if max(dimensions) < count and pair == tuple(
                    prod(shape[at] for at in dimensions) for shape in shapes
                ):
                    return _SizeRule(tensor, dimensions)
    if pair[0] == pair[1]:
        return pair[0]
    raise UnseenShapesError(
        f"{name} returns {pair[0]} and, with other rows, {pair[1]} in dimension {place}, which no "
        "input has"
    )
