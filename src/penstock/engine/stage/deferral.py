"""Splitting a backward: weight gradients are put off until they are asked for.

A backward computes two things that nobody needs at the same time: the gradient of the input, for
which the stage before waits, and those of the weights, which may wait until the update. Here the
layers that hold nearly all weights leave the second part to a queue, at the moment when the
gradient of their output is known. What must be kept for it is the layer's input and that gradient.

torch's own pipelining finds the same split by walking the finished graph; it then keeps the whole
graph in between, and cannot split what ends in a view.

How: while a ``Deferral`` is active, a call such as ``F.linear(x, weight, bias)`` runs with detached
parameters, so that autograd itself gives the gradient of ``x`` and none else. Behind it stands a
``_Tap``, which passes the gradient of the output on and puts it in the queue together with ``x``.

A full backward sums all uses of a parameter in one microbatch, in the order in which they arrive,
before it adds to ``.grad``. So that a split one does the same to the bit, other uses of a parameter
that might also be deferred are queued as well, as finished gradients (``_Use``).

Where a stage comes and goes, whole backwards go the same way, but put nothing off: the gradient of
a weight that is used once is written where it is added up (``GradientSlots``), as soon as it can
be. Autograd would make a new tensor for each, and new pages cost more than what is computed.
"""

from __future__ import annotations

import types
from collections import Counter, deque
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.base.errors import InputError
from penstock.engine.masters import gradient_dtype
from penstock.engine.model.modes import Args, FunctionMode, Named
from penstock.engine.stage.deferrable import Deferrable, Formula, split_of
from penstock.engine.weights.gradient_slots import GradientSlots

_UNDEFERRED_KINDS = (
    nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase, nn.RNNBase,
    nn.RNNCellBase, nn.PReLU,
)  # fmt: skip
"""Modules whose parameters no deferred call takes."""


class _DeferredGradient(NamedTuple):
    """Gradients of some parameters: still to be computed, or (no formula) there already."""

    parameters: tuple[Tensor, ...]
    formula: Formula | None
    gradient: Tensor
    saved: Tensor | None

    def gradients(self) -> tuple[Tensor, ...]:
        if self.formula is None or self.saved is None:
            return (self.gradient,)
        return self.formula(self.gradient, self.saved)


class _Entries(deque[_DeferredGradient]):
    """The gradients of one microbatch that wait, in the order in which they have arrived.

    Args:
        slots: where gradients are added up that need not wait; ``None`` if all of them do.

    Attributes:
        goes_back: whether the forward has ended, so that what arrives is of the backward.
    """

    def __init__(self, slots: GradientSlots | None) -> None:
        super().__init__()
        self._slots = slots
        self._uses: Counter[int] = Counter()
        self.goes_back = False

    def note(self, parameters: Iterable[Tensor]) -> None:
        """The forward uses parameters: so many gradients of each will arrive."""
        if self._slots is not None:
            self._uses.update(map(id, parameters))

    def put(self, entry: _DeferredGradient) -> None:
        """Take a gradient that has arrived: add it at once, or let it wait."""
        if self._slots is None or not self.goes_back or not self._added(entry, self._slots):
            self.append(entry)

    def _added(self, entry: _DeferredGradient, slots: GradientSlots) -> bool:
        """Add gradients at once, if nothing else has to be summed with them before."""
        if entry.formula is None or entry.saved is None:
            return False
        if any(self._uses[id(own)] > 1 or _has_hooks(own) for own in entry.parameters):
            return False
        with torch.no_grad():
            into = slots.memory_for(entry.parameters[0])
            gradients = entry.formula(entry.gradient, entry.saved, into=into)
            for parameter, gradient in zip(entry.parameters, gradients, strict=True):
                accumulate(parameter, gradient, owned=True)
        return True


class Deferral(FunctionMode):
    """The deferred weight gradients of one microbatch.

    Active around its forward, it diverts what can be deferred. Active around its backward, it does
    the same to forwards that are run again there (activation checkpointing).

    Args:
        undeferred: ids of parameters of which no use is ever deferred.
        slots: where gradients of a whole backward are added up, none of which is put off unless
            others are to be summed with it; ``None`` for a split one.
    """

    def __init__(self, undeferred: frozenset[int], slots: GradientSlots | None = None) -> None:
        super().__init__()
        self._undeferred = undeferred
        self._puts_off = slots is None
        self._entries = _Entries(slots)
        # What a diverted call gives must need a gradient even if its input needs none.
        self._anchor = torch.empty(0, requires_grad=True)

    def call(self, func: Any, args: Args, named: Named) -> Any:
        """Run ``func``, with its weight gradients deferred if that is possible."""
        if not torch.is_grad_enabled():
            return func(*args, **named)
        if func is F.multi_head_attention_forward:
            with self:
                return _past_its_check(func)(*args, **named)
        split = split_of(func, args, named)
        if split is not None:
            return self._divert(split)
        if getattr(func, "__name__", "") not in _LOOKS_AT_A_TENSOR or func in _TRANSPOSES:
            args = tuple([self._use(value) for value in args])
            named = {name: self._use(value) for name, value in named.items()} if named else named
        return func(*args, **named)

    def _divert(self, split: Deferrable) -> Tensor:
        self._entries.note(split.parameters)
        given = split.cast(self._use(split.input))
        output: Tensor = _Tap.apply(  # type: ignore[no-untyped-call]
            self._anchor, split.run(given), given, self._entries, split.parameters, split.formula
        )
        return output

    def _use(self, value: Any) -> Any:
        """A stand-in for an argument of an operation that is not deferred."""
        kind = type(value)
        if kind is list or kind is tuple:
            return kind([self._use(item) for item in value])
        if kind is not nn.Parameter or not value.requires_grad or id(value) in self._undeferred:
            return value
        self._entries.note((value,))
        # In a tuple, since the hooks of a parameter that autograd sees would fire, with None.
        return _Use.apply(self._anchor, self._entries, (value,))  # type: ignore[no-untyped-call]

    def check_forward(self) -> None:
        """Look, behind the forward, whether a layer took gradients in it.

        Raises:
            InputError: it did, through weights whose gradients are deferred: these would be taken
                for those of the backward, and gradients of such gradients would lack a part.
        """
        self._entries.goes_back = True
        if self._entries:
            self._entries.clear()
            remedy = (
                "through weights whose gradients this schedule puts off; take one whose backwards "
                'are whole, such as "1f1b"'
                if self._puts_off
                else "as it did not in its first one; let it do so always or never, where stages "
                "come and go"
            )
            raise InputError(
                "a layer goes backward inside its forward (torch.autograd.grad or backward there), "
                f"{remedy}"
            )

    def settle(self) -> None:
        """After the backward: accumulate the gradients of parameters that wait for nothing."""
        if all(entry.formula is not None for entry in self._entries):
            return
        waiting = {id(p) for e in self._entries if e.formula is not None for p in e.parameters}
        entries = list(self._entries)
        self._entries.clear()
        finished: deque[_DeferredGradient] = deque()
        for entry in entries:
            waits = id(entry.parameters[0]) in waiting
            (self._entries if waits else finished).append(entry)
        _accumulate_all(finished)

    def held(self) -> list[Tensor]:
        """The tensors kept for gradients that are still to be computed."""
        held = [tensor for entry in self._entries for tensor in (entry.gradient, entry.saved)]
        return [tensor for tensor in held if tensor is not None]

    def run(self) -> None:
        """Compute what was deferred and accumulate it in ``.grad``."""
        _accumulate_all(self._entries)


class _Tap(torch.autograd.Function):
    """Lets the gradient of a diverted call's output pass, and queues it."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        output: Tensor,
        given: Tensor,
        entries: _Entries,
        parameters: tuple[Tensor, ...],
        formula: Formula,
    ) -> Tensor:
        # Saved as autograd saves: checkpointing may drop it, and overwriting it is noticed.
        ctx.save_for_backward(given.detach())
        ctx.set_materialize_grads(False)
        ctx.entries, ctx.parameters, ctx.formula = entries, parameters, formula
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        if gradient is not None:
            (given,) = ctx.saved_tensors
            ctx.entries.put(_DeferredGradient(ctx.parameters, ctx.formula, gradient, given))
        return None, gradient, None, None, None, None


class _Use(torch.autograd.Function):
    """Stands for a parameter and queues the gradient that it would get."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, entries: _Entries, parameters: tuple[Tensor]) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.entries, ctx.parameters = entries, parameters
        return parameters[0].detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        if gradient is not None:
            ctx.entries.put(_DeferredGradient(ctx.parameters, None, gradient, None))
        return None, None, None


def undeferred_parameters(modules: Iterable[nn.Module]) -> frozenset[int]:
    """Ids of parameters that only modules hold which never defer: they need no watching."""
    held: dict[bool, set[int]] = {True: set(), False: set()}
    for module in modules:
        undeferred = isinstance(module, _UNDEFERRED_KINDS)
        held[undeferred] |= {id(parameter) for parameter in module.parameters(recurse=False)}
    return frozenset(held[True] - held[False])


def _accumulate_all(entries: deque[_DeferredGradient]) -> None:
    """Sum every parameter's gradients in their order, then add the sum to its ``.grad``."""
    left: dict[int, int] = {}
    for entry in entries:
        for parameter in entry.parameters:
            left[id(parameter)] = left.get(id(parameter), 0) + 1
    sums: dict[int, Tensor] = {}
    with torch.no_grad():
        while entries:
            entry = entries.popleft()
            for parameter, gradient in zip(entry.parameters, entry.gradients(), strict=True):
                key = id(parameter)
                before = sums.pop(key, None)
                total = gradient if before is None else before + gradient
                left[key] -= 1
                if left[key]:
                    sums[key] = total
                else:
                    owned = before is not None or entry.formula is not None
                    accumulate(parameter, total, owned)


def accumulate(parameter: Tensor, gradient: Tensor, owned: bool) -> None:
    """Add to ``.grad`` as autograd does; a first gradient that nobody else has is adopted."""
    if not parameter.requires_grad:
        return
    hooked = _has_hooks(parameter)
    if not hooked and parameter.grad is not None:
        parameter.grad.add_(gradient)
    elif not hooked and owned and gradient.stride() == parameter.stride():
        parameter.grad = gradient.to(gradient_dtype(parameter))
    else:
        torch.autograd.backward([parameter], [gradient])


def _has_hooks(parameter: Tensor) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


class GradientsInForward(FunctionMode):
    """Looks, around a forward, whether a layer takes gradients in it.

    Attributes:
        any: whether one has.
    """

    def __init__(self) -> None:
        super().__init__()
        self.any = False

    def call(self, func: Any, args: Args, named: Named) -> Any:
        """Run ``func``, and look whether it goes back."""
        self.any = self.any or func in _GOES_BACK
        return func(*args, **named)


_GOES_BACK = (torch.autograd.grad, Tensor.backward)

_LOOKS_AT_A_TENSOR = frozenset({
    "__get__", "__set__", "requires_grad_", "register_hook", "retain_grad",
    "register_post_accumulate_grad_hook", "size", "dim", "stride", "numel", "__len__", "data_ptr",
    "__hash__", "__repr__", "__format__",
})  # fmt: skip
"""Names of functions that do not compute with a tensor, but read or change what it is."""

_TRANSPOSES = (Tensor.T.__get__, Tensor.mT.__get__)  # type: ignore[attr-defined]


@cache
def _past_its_check(function: types.FunctionType) -> types.FunctionType:
    """A function of torch that is written in Python, without its own check for modes.

    Every such function asks first whether a mode wants the call as a whole, and is then run with
    the mode off. Here the calls inside are wanted.
    """
    own = {**function.__globals__, "has_torch_function": _never}
    twin = types.FunctionType(
        function.__code__, own, function.__name__, function.__defaults__, function.__closure__
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def _never(_: object) -> bool:
    return False
