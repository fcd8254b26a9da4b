"""Initial values of layers: drawn one layer at a time, the same ones however the model is spread,
and put where they belong.

A layer on ``meta`` has none yet; one in main memory may be drawn anew. A layer is drawn in main
memory and then moved, so that its values depend on the seed and on its number in the model, and not
on stages, ranks or kinds of device; and no more than one layer at a time is anywhere but where it
belongs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from penstock.base.errors import ModelError
from penstock.engine.device.crossing import give_memory, moved
from penstock.engine.model.randomness import stream_seed
from penstock.engine.model.spine import NamedLayer
from penstock.engine.tensor.group import TensorGroup
from penstock.engine.tracing.layers import CapturedLayer


def place_parameters(module: nn.Module, device: torch.device) -> None:
    """Move the parameters of a module, and of those inside it. They stay the objects that they are,
    so that whoever holds them (an optimizer, a layer that is tied to another one) still does."""
    for parameter in module.parameters():
        move_parameter(parameter, device)
    for part in module.modules():
        if isinstance(part, CapturedLayer):
            part.compute_on(device)


def place_buffers(
    modules: Iterable[nn.Module], device: torch.device, but: Collection[int] = ()
) -> None:
    """Move the buffers of modules, not of those inside them.

    Args:
        modules: all of a rank, so that a buffer of several is still one.
        but: the ids of buffers that stay where they are.
    """
    placed: dict[int, Tensor] = {}
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in but:
                if id(buffer) not in placed:
                    placed[id(buffer)] = there = moved(buffer, device)
                    placed[id(there)] = there
                module._buffers[name] = placed[id(buffer)]


def move_parameter(parameter: nn.Parameter, device: torch.device) -> None:
    """Give a parameter, and its gradient if it has one, memory on another device."""
    gradient = parameter.grad
    if parameter.device != device:
        parameter.grad = None
        give_memory(parameter, moved(parameter.data, device))
        parameter.grad = None if gradient is None else moved(gradient, device)


Init = Literal["given", "per-layer"]
"""Which initial values a model has: those that it was given, or new ones, drawn layer by layer."""

_DRAWING = -1  # the step before the first, for seeds


class Values(Protocol):
    """Where layers have their initial values from."""

    def draw(self, index: int) -> bool:
        """Give the layer with this number its values; whether there was anything to do."""


class Initialiser:
    """Gives layers initial values, by the ``reset_parameters`` of their modules.

    A parameter that several layers hold has the values of the first of them that is drawn.
    Parameters stay the objects that they are.

    Args:
        layers: of the whole model.
        seed: of the whole model.
        anew: whether parameters that have values are drawn again, and buffers set again that
            ``reset_parameters`` sets; otherwise only what is on ``meta`` is.

    Raises:
        ModelError: a module holds what it has no ``reset_parameters`` for.
    """

    def __init__(self, layers: Sequence[NamedLayer], seed: int, *, anew: bool) -> None:
        self._layers = layers
        self._seed = seed
        self._anew = anew
        self._drawn: set[int] = set()
        """Modules and parameters, by their ids."""
        for layer in layers:
            for name, module in layer.module.named_modules():
                if self._concerns(module):
                    self._check(module, _path(layer, name))

    def draw(self, index: int) -> bool:
        """Give a layer its values.

        Args:
            index: the layer's number in the model.

        Returns:
            Whether there was anything to do.

        Raises:
            ModelError: a ``reset_parameters`` leaves something out.
        """
        layer = self._layers[index]
        if not any(map(self._concerns, layer.module.modules())):
            return False
        drew = False
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(stream_seed(self._seed, _DRAWING, 0, index))
            # Those inside first, as constructors do it.
            for name, module in reversed([*layer.module.named_modules()]):
                if self._concerns(module) and reset_of(module) is not None:
                    self._reset(module, _path(layer, name))
                    drew = True
        return drew

    def _concerns(self, module: nn.Module) -> bool:
        """Whether a module holds anything itself that is to be given values."""
        return any(self._wants(module, tensor) for _, tensor in _held(module))

    def _wants(self, module: nn.Module, tensor: Tensor) -> bool:
        if tensor.is_meta or not self._anew:
            return tensor.is_meta
        # Buffers are other objects once they were placed.
        return id(tensor if isinstance(tensor, nn.Parameter) else module) not in self._drawn

    def _must_have(self, module: nn.Module) -> list[tuple[str, Tensor]]:
        """Tensors to which nothing but ``reset_parameters`` can give values: buffers that have some
        keep them."""
        return [
            (key, tensor)
            for key, tensor in _held(module)
            if self._wants(module, tensor) and (tensor.is_meta or isinstance(tensor, nn.Parameter))
        ]

    def _check(self, module: nn.Module, path: str) -> None:
        concerned = self._must_have(module)
        if concerned and reset_of(module) is None:
            keys = ", ".join(repr(key) for key, _ in concerned)
            raise ModelError(
                f"{path!r} ({type(module).__name__}) holds {keys}{self._on_meta} and has no "
                f"reset_parameters to give them values; write one, or {self._remedy}"
            )

    @property
    def _on_meta(self) -> str:
        return "" if self._anew else " on the meta device"

    @property
    def _remedy(self) -> str:
        return "leave init='per-layer' out" if self._anew else "build the model on the CPU"

    def _reset(self, module: nn.Module, path: str) -> None:
        # What is tied to a layer that was drawn before, or has values that nobody wants anew.
        kept = [
            (tensor, tensor.clone())
            for _, tensor in _held(module)
            if not self._wants(module, tensor)
        ]
        keys = [key for key, _ in self._must_have(module)]
        for _, tensor in self._must_have(module):
            emptied(tensor)
        reset = reset_of(module)
        assert reset is not None
        reset()
        for tensor, values in kept:
            tensor.copy_(values)
        held = dict(_held(module))
        self._drawn |= {id(module), *(id(tensor) for tensor in held.values())}
        for key in keys:
            tensor = held[key]
            if _may_be_nan(tensor) and tensor.isnan().any():
                raise ModelError(
                    f"reset_parameters of {path!r} ({type(module).__name__}) leaves {key!r} "
                    f"without values; set them there, or {self._remedy}"
                )


def _path(layer: NamedLayer, name: str) -> str:
    return f"{layer.name}.{name}".rstrip(".")


def reset_of(module: nn.Module) -> Callable[[], Any] | None:
    """The method that sets a module's own parameters and buffers, if it has one."""
    # torch's own attention has it as a private one.
    reset = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
    return reset if callable(reset) else None


def _held(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    for held in (module._parameters, module._buffers):
        yield from ((key, tensor) for key, tensor in held.items() if tensor is not None)


def _may_be_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def emptied(tensor: Tensor) -> Tensor:
    """A parameter or buffer, with memory for its values on the host; not yet with its values, of
    which NaN would tell that nobody has set them."""
    if tensor.device.type != "cpu":
        give_memory(tensor, torch.empty_like(tensor, device="cpu"))
    if _may_be_nan(tensor):
        tensor.fill_(torch.nan)
    return tensor


_MARK = "_penstock_in_parts"


class Wholes:
    """Brings the whole values of layers to a process that trains parts of them, for one layer at a
    time, and takes them away again.

    Layers are divided since whole ones take too much memory; beside the parts of them, the tensors
    of the model that the user has built would take it all the same. So layer by layer, whole values
    come (from the model, a file, or drawn), members are made equal, each takes its parts, and the
    whole tensors of the model go to ``meta``: names, shapes and what is frozen stay, numbers do
    not.

    Args:
        layers: of one rank, by their numbers in the model.
        values: where they have their initial values from.
        group: the rank's; its channels take what is in main memory.
        divided: the ids of the model's tensors of which members have parts.
    """

    def __init__(
        self,
        layers: Mapping[int, NamedLayer],
        values: Values,
        group: TensorGroup,
        divided: Collection[int],
    ) -> None:
        self._numbers = {layer.name: number for number, layer in layers.items()}
        self._values = values
        self._group = group
        self._divided = divided
        self._times_wanted = Counter(
            id(parameter) for layer in layers.values() for parameter in layer.module.parameters()
        )

    def come(self, layer: NamedLayer) -> None:
        """Give a layer the values that all members begin with."""
        self._values.draw(self._numbers[layer.name])
        module = layer.module
        held = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
        with torch.no_grad():
            for tensor in held.values():
                tensor.copy_(self._group.of_first(tensor.detach().cpu()))

    def go(self, layer: NamedLayer) -> None:
        """Of what members have parts, drop the whole, unless another layer is tied to it."""
        for parameter in layer.module.parameters():
            self._times_wanted[id(parameter)] -= 1
            if id(parameter) in self._divided and not self._times_wanted[id(parameter)]:
                _drop(parameter)


def _drop(parameter: nn.Parameter) -> None:
    """Let a parameter be the object that it is, without numbers."""
    nothing = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    vars(nothing).update(vars(parameter))
    vars(nothing)[_MARK] = True
    # torch refuses where a graph or a weak reference of the user's still needs it.
    with suppress(RuntimeError):
        torch.utils.swap_tensors(parameter, nothing)  # type: ignore[no-untyped-call]


def check_there(layers: Sequence[NamedLayer]) -> None:
    """Raise ``ModelError`` for a model whose values an earlier pipeline has kept in parts: they
    would be drawn anew."""
    for layer in layers:
        for name, parameter in layer.module.named_parameters():
            if parameter.is_meta and getattr(parameter, _MARK, False):
                raise ModelError(
                    f"{layer.key(name)!r} has no values any more: an earlier Pipeline has trained "
                    "it in parts, of which this process had one; build the model anew, and load a "
                    "checkpoint or what gather_state_dict() gave"
                )
