"""What a model on ``meta`` needs beside its files: buffers that are not persistent.

No state_dict has them, since the model's code computes them: the frequencies of rotary embeddings,
the numbers of positions. On ``meta`` that computing has come to nothing, so it is done again, by
the ``reset_parameters`` of the module that holds them, or by the ``_init_weights`` of a model of
transformers. It is done to a copy, from two different beginnings: what differs then, nobody has
set.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.base.errors import ModelError
from penstock.engine.model.spine import NamedLayer
from penstock.engine.run.materialising import emptied, reset_of

_MOST_NAMED = 3
_REMEDY = (
    "no file has their values; give {kind} a reset_parameters() that sets them, register them as "
    "persistent, or build the model on the CPU"
)


class _Owner(NamedTuple):
    """The module of the model that holds a buffer, and its name in the model."""

    path: str
    module: nn.Module


class Unstored:
    """Computes buffers on ``meta`` that are not persistent.

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
            id(buffer): _Owner(path, module)
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
            name = next(key for key, one in owner.module._buffers.items() if one is buffer)
            first, second = (self._computed(owner, name, fill) for fill in (0, 1))
            if first.shape != buffer.shape or not torch.equal(first, second):
                raise _nobody_sets(owner)
            emptied(buffer).copy_(first)
        return bool(hidden)

    def _computed(self, owner: _Owner, name: str, fill: int) -> Tensor:
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
            id(one): nn.Parameter(torch.empty_like(one, device="meta"), one.requires_grad)
            for one in owner.module.parameters()
        }
        twin = copy.deepcopy(owner.module, nothing | begun)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)  # the same on every process
            reset = reset_of(twin)
            if reset is not None:
                reset()
            elif self._init is not None:
                self._init(twin)
        value = twin._buffers[name]
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


def _nobody_sets(owner: _Owner) -> ModelError:
    hidden = owner.module._non_persistent_buffers_set
    names = [
        name
        for name, buffer in owner.module._buffers.items()
        if name in hidden and buffer is not None and buffer.is_meta
    ]
    told = ", ".join(repr(f"{owner.path}.{name}".lstrip(".")) for name in names[:_MOST_NAMED])
    kind = type(owner.module).__name__
    return ModelError(
        f"{told} of {kind} are on the meta device and not persistent, so "
        f"{_REMEDY.format(kind=kind)}"
    )


def _check_no_strays(layer: NamedLayer) -> None:
    """Raise ``ModelError`` for a tensor on ``meta`` that is neither parameter nor buffer: nobody
    can give it values."""
    module = layer.module
    held = {id(one) for one in (*module.parameters(), *module.buffers())}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, Tensor) and value.is_meta and id(value) not in held:
                raise ModelError(
                    f"layer {layer.name!r} keeps {f'{path}.{name}'.lstrip('.')!r} as a tensor on "
                    "the meta device that is neither parameter nor buffer, so nothing can give it "
                    "values; register it as a buffer, make it in forward, or build the model on "
                    "the CPU"
                )
