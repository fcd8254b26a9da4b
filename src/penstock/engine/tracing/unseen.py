"""Doings of a forward that tracing does not see, though its output may look right.

Numbers that Python or numpy draws are constants in a graph. What only a backward does, as a
function of its own or a hook on a tensor, is in no graph at all, nor are attributes that a forward
sets. Of numbers and words that a forward reads from its modules a graph keeps what they were
(``Settings``). Modules that stay whole may do all of that: they are called as they are.
"""

from __future__ import annotations

import inspect
import random
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import CheckpointFunction

from penstock.base.errors import ModelError
from penstock.engine.model import tree
from penstock.engine.model.modes import Args, FunctionMode, Named
from penstock.engine.tracing.lines import PAGE, CodeLine, is_models, running_line

_TORCHS_OWN = frozenset({*vars(nn.Module()), "forward"})
"""Attributes that every module has, among them those that hold parameters, buffers and children."""
_WHOLE = "in a module without children, which is called as it is"


def drawn_so_far() -> object:
    """Where the generators of Python and numpy stand; equal if nobody drew in between."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate()
    kind, key, position, *rest = numpy.random.get_state()
    return random.getstate(), (kind, key.tobytes(), position, *rest)


@contextmanager
def generators_of_python_kept() -> Iterator[None]:
    """A context after which the generators of Python and numpy stand where they stood before."""
    numpy = sys.modules.get("numpy")
    ours, theirs = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        random.setstate(ours)
        if numpy:
            numpy.random.set_state(theirs)


def check_draws(name: str, run: Callable[[], Any], calm: Collection[nn.Module]) -> None:
    """Run a model, and see where it draws numbers that a graph would keep for ever.

    Args:
        name: of the model.
        run: runs it.
        calm: the modules that stay whole.

    Raises:
        ModelError: it draws with Python or numpy; names the line.
    """
    watch = _DrawWatch(calm)
    before = sys.gettrace()
    sys.settrace(watch.entered)
    try:
        run()
    finally:
        sys.settrace(before)
    if watch.line is not None:
        raise ModelError(
            f"{name} would always do what it did when it was traced, because of {watch.line}: it "
            "draws a number with Python's random or numpy, which no graph sees. Draw with torch, "
            "and choose with tensors: `keep = torch.rand(rows, 1, …) > rate`, then `value + keep * "
            f"layer(value)`; or draw {_WHOLE}; or, if the number changes nothing, capture with "
            f"verify=False (see {PAGE})"
        )


class _DrawWatch:
    """Looks, after each line of a model's code, whether it has drawn a number."""

    def __init__(self, calm: Collection[nn.Module]) -> None:
        self.line: CodeLine | None = None
        self._calm = calm
        self._state = drawn_so_far()
        self._last: CodeLine | None = None

    def entered(self, frame: FrameType, event: str, _: Any) -> Any:
        # Only lines of the model: to look after each line of torch would take minutes.
        return self._stepped if event == "call" and is_models(frame) else None

    def _stepped(self, frame: FrameType, event: str, _: Any) -> Any:
        state = drawn_so_far()
        if state != self._state and self.line is None:
            self.line = self._last
        self._state = state
        if event == "line":
            self._last = running_line(frame, self._calm)
        return self._stepped


class HookWatch(FunctionMode):
    """While active, notes the first line of a model that hangs a hook on a tensor.

    Attributes:
        line: that line, or ``None``.
    """

    def __init__(self, calm: Collection[nn.Module]) -> None:
        super().__init__()
        self.line: CodeLine | None = None
        self._calm = calm

    def call(self, func: Any, args: Args, named: Named) -> Any:
        if func is Tensor.register_hook and self.line is None:
            self.line = running_line(sys._getframe(2), self._calm)
        return func(*args, **named)


def check_backward(name: str, expected: Any, output: Any, hooked: CodeLine | None) -> None:
    """See that the backward of captured layers has all that the model's own has.

    Args:
        name: of the model.
        expected: what the model returned.
        output: what its layers returned.
        hooked: where the model hung a hook on a tensor.

    Raises:
        ModelError: functions with a backward of their own, or hooks, got lost.
    """
    if hooked is not None:
        raise ModelError(
            f"{name} would train otherwise, because of {hooked}: a hook on a tensor is in no "
            f"graph, so the gradient would not go through it. Hang it up {_WHOLE} (see {PAGE})"
        )
    functions, reached = _behind(expected)
    functions_kept, reached_too = _behind(output)
    for function in functions - functions_kept:
        if function is CheckpointFunction:
            raise ModelError(
                f"{name} would train otherwise, because it runs a part again in backward with "
                "torch.utils.checkpoint, which a graph does not; give checkpoint "
                "use_reentrant=False, or leave it out and let the plan recompute stages (see "
                f"{PAGE})"
            )
        raise ModelError(
            f"{name} would train otherwise, because it applies {function.__qualname__}, an "
            "autograd.Function of its own: a graph has what its forward does, but not its "
            f"backward. Apply it {_WHOLE} (see {PAGE})"
        )
    if reached != reached_too:
        raise ModelError(
            f"{name} would train otherwise: gradients reach {len(reached)} of its parameters, but "
            f"{len(reached_too)} if it is run layer by layer, so it does what tracing does not "
            f"see; give it a method `spine(self)` (see {PAGE})"
        )


def _behind(output: Any) -> tuple[Counter[type], set[int]]:
    """How often a backward of some tensors runs functions that are not torch's own, by class; and
    the ``id`` of each tensor that it gives a gradient."""
    waiting: list[Any] = [tensor.grad_fn for tensor in tree.tensors(output)]
    met: set[Any] = set()
    functions: Counter[type] = Counter()
    reached: set[int] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in met:
            continue
        met.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            function = vars(type(node))["_forward_cls"]
            if function is CheckpointFunction or function.__module__.split(".")[0] != "torch":
                functions[function] += 1
        elif hasattr(node, "variable"):
            reached.add(id(node.variable))
        waiting.extend(before for before, _ in node.next_functions)
    return functions, reached


def check_constants(name: str, constants: Iterable[Any]) -> None:
    """See that no tensor of a graph is one that was made while there were no values.

    Args:
        name: of the model.
        constants: what the graph reads that the model does not hold.

    Raises:
        ModelError: one is.
    """
    if any(isinstance(tensor, FakeTensor) for tensor in tree.tensors([*constants])):
        raise ModelError(
            f"{name} makes a tensor when it is first called, and keeps it in an attribute for "
            "later calls; a graph has no values for that one. Make it in __init__ with "
            f"register_buffer, or anew in each forward (see {PAGE})"
        )


@contextmanager
def attributes_kept(model: nn.Module, calm: Collection[nn.Module]) -> Iterator[list[str]]:
    """A context after which a model's modules have the attributes that they had before. Buffers and
    parameters are for others.

    Args:
        model: the model.
        calm: modules that stay whole, which may do what they like.

    Yields:
        A list that has, afterwards, the names of attributes that were set or grew.
    """
    whole = {id(module) for module in calm}
    before = [
        (name, module, dict(vars(module)), _lengths(module))
        for name, module in model.named_modules()
        if id(module) not in whole
    ]
    changed: list[str] = []
    try:
        yield changed
    finally:
        changed += [
            f"{name}.{attribute}" if name else attribute
            for name, module, attributes, lengths in before
            for attribute in _put_back(module, attributes, lengths)
        ]


def warn_of_attributes(name: str, changed: list[str]) -> None:
    """Warn whoever captures a model of what its forward sets.

    Args:
        name: of the model.
        changed: names of attributes.
    """
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        warnings.warn(
            f"the forward of {name} sets {', '.join(changed[:3])}{more}, which its layers will not "
            "do; register a buffer and write into it with copy_, or return what you want to see "
            f"(see {PAGE})",
            stacklevel=8,  # who calls ``capture``, which tells how long it takes
        )


def _lengths(module: nn.Module) -> dict[str, int]:
    held = vars(module).items()
    return {
        name: len(value)
        for name, value in held
        if isinstance(value, list | set | dict) and name not in _TORCHS_OWN
    }


def _put_back(module: nn.Module, attributes: dict[str, Any], lengths: dict[str, int]) -> list[str]:
    """Undo what has become of a module's attributes; gives their names."""
    now = vars(module)
    changed = [name for name in now if name not in _TORCHS_OWN and _is_new(name, attributes, now)]
    grown = [name for name in lengths if len(attributes[name]) > lengths[name]]
    for name in grown:
        if isinstance(attributes[name], list):
            del attributes[name][lengths[name] :]
    for name in changed:
        if name in attributes:
            now[name] = attributes[name]
        else:
            del now[name]
    return changed + grown


def _is_new(name: str, before: dict[str, Any], now: dict[str, Any]) -> bool:
    if name not in before:
        return True
    value = now[name]
    if isinstance(value, int | float | str):
        return bool(before[name] != value)
    return before[name] is not value


_MISSING = object()
_WATCHING = threading.Lock()
"""Who watches replaces what all modules have in common, so only one may at a time."""


class Settings:
    """Which attributes a model's code read while it was traced, and what they were.

    Modules that stay whole have none: they are called as they are, and read theirs anew each time.

    Attributes:
        read: by the name of a module and of its attribute, the values that were read; several if
            the two modes differ.
    """

    def __init__(self) -> None:
        self.read: dict[tuple[str, str], list[Any]] = {}

    @contextmanager
    def watching(self, model: nn.Module, calm: Collection[nn.Module]) -> Iterator[None]:
        """A context in which what a model's code reads of its modules is noted, but for what it
        sets itself.

        Args:
            model: the model.
            calm: the modules that stay whole.
        """
        whole = {id(module) for module in calm}
        names = {
            id(module): name for name, module in model.named_modules() if id(module) not in whole
        }
        written: set[tuple[str, str]] = set()
        set_it = nn.Module.__setattr__

        def is_own(module: nn.Module, attribute: str) -> bool:
            known = id(module) in names and attribute not in _TORCHS_OWN
            return known and is_models(sys._getframe(2))

        def read(module: nn.Module, attribute: str) -> Any:
            value = object.__getattribute__(module, attribute)
            simple = isinstance(value, bool | int | float | str | None)
            if simple and is_own(module, attribute) and _held(module, attribute) is value:
                values = self.read.setdefault((names[id(module)], attribute), [])
                if not _is_among(value, values):
                    values.append(value)
            return value

        def write(module: nn.Module, attribute: str, value: Any) -> None:
            if is_own(module, attribute):
                written.add((names[id(module)], attribute))
            set_it(module, attribute, value)

        with _WATCHING:
            # Attributes that a module has never come to ``__getattr__``, which tracers replace.
            nn.Module.__getattribute__ = read  # type: ignore[method-assign,assignment]
            nn.Module.__setattr__ = write  # type: ignore[method-assign,assignment]
            try:
                yield
            finally:
                del nn.Module.__getattribute__
                nn.Module.__setattr__ = set_it  # type: ignore[method-assign]
        for key in written & self.read.keys():
            del self.read[key]

    def check(self, captured: nn.Module, model: nn.Module) -> None:
        """See that a model's attributes are what they were.

        Args:
            captured: where somebody may have set attributes that are the model's.
            model: the model that was captured.

        Raises:
            ModelError: one has changed, which no graph would notice.
        """
        for (name, attribute), values in self.read.items():
            holders = _modules_called(name, model)
            # What the capture has of its own, it says in its class.
            own = type(captured).__annotations__
            if not name and attribute in vars(captured) and attribute not in own:
                holders.append(captured)
            for holder in holders:
                now = _held(holder, attribute)
                if now is not _MISSING and not _is_among(now, values):
                    whose = f"{name}.{attribute}" if name else attribute
                    raise ModelError(
                        f"{type(model).__name__}.{whose} is {now!r}, but it was {values[0]!r} when "
                        "the model was captured, and its layers go on with that: the code that "
                        "reads it is in a graph. Set it back, or capture the model again and build "
                        "a new Pipeline; what modules without children hold may change"
                    )


def _modules_called(name: str, model: nn.Module) -> list[nn.Module]:
    """The module of a name, or none; a call asks for a few of what may be thousands."""
    try:
        return [model.get_submodule(name)]
    except AttributeError:
        return []


def _held(module: nn.Module, attribute: str) -> Any:
    """The value that a module or its class has under a name, without asking a property for it."""
    held = object.__getattribute__(module, "__dict__")
    if attribute in held:
        return held[attribute]
    return inspect.getattr_static(type(module), attribute, _MISSING)


def _is_among(value: Any, values: list[Any]) -> bool:
    # Not a number is equal to nothing, not even to itself.
    return any(value is other or bool(value == other) for other in values)
