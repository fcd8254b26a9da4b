"""A model's spine: the layers it runs, one after another.

A pipeline can cut a model only where a single value passes from one layer to the next. An
``nn.Sequential`` is such a chain; any other module names its chain in a ``spine`` attribute or
method::

    class GPT(nn.Module):
        def spine(self):
            return [self.embedding, *self.blocks, self.head]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor, nn

from penstock.errors import ModelError
from penstock.graph import fingerprint

_HOW = (
    "Give the model a method `spine(self)` that returns its layers in execution order, for example "
    "`return [self.embedding, *self.blocks, self.head]`, each taking the previous one's output; or "
    "make it an nn.Sequential."
)


class NamedLayer(NamedTuple):
    """One layer of a spine.

    ``name`` is unique within the spine; ``prefix`` is the module's qualified name in the model,
    so that ``prefix + "." + key`` are the keys of the model's own ``state_dict``.
    """

    name: str
    prefix: str
    module: nn.Module

    @property
    def signature(self) -> str:
        """Shapes and dtypes of the parameters, by which a plan recognises its model."""
        return ",".join(
            f"{name}:{'x'.join(map(str, parameter.shape))}:{str(parameter.dtype)[6:]}"
            for name, parameter in self.module.named_parameters()
        )


def spine_of(model: nn.Module) -> tuple[NamedLayer, ...]:
    """The layers of ``model`` in execution order.

    Raises:
        ModelError: it names no spine, an entry is not a module, or a parameter or buffer of the
            model is in no layer (it would silently not be trained).
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"the model is a {type(model).__name__}, not an nn.Module. {_HOW}")
    layers = tuple(_named(model, _modules(model)))
    if not layers:
        raise ModelError(f"the spine of {type(model).__name__} has no layers. {_HOW}")
    _check_covered(model, layers)
    return layers


def spine_fingerprint(layers: Iterable[NamedLayer]) -> str:
    """The fingerprint that a profile of these layers has."""
    return fingerprint((layer.name, layer.signature) for layer in layers)


def _modules(model: nn.Module) -> list[object]:
    spine: object = getattr(model, "spine", None)
    if spine is None:
        if isinstance(model, nn.Sequential):
            if type(model).forward is not nn.Sequential.forward:
                raise ModelError(
                    f"{type(model).__name__} is an nn.Sequential with a forward of its own, so its "
                    f"children need not be its spine. {_HOW}"
                )
            return list(model)
        raise ModelError(f"{type(model).__name__} does not name its spine. {_HOW}")
    # A ModuleList is callable too, but it is the list itself.
    listed = spine() if callable(spine) and not isinstance(spine, nn.Module) else spine
    if not isinstance(listed, Iterable):
        raise ModelError(f"{type(model).__name__}.spine is not a list of layers. {_HOW}")
    return list(listed)


def _named(model: nn.Module, modules: Iterable[object]) -> Iterator[NamedLayer]:
    names: dict[int, list[str]] = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        names[id(module)].append(name)
    seen: dict[str, int] = {}
    for index, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise ModelError(
                f"entry {index} of the spine is a {type(module).__name__}, not an nn.Module; "
                "wrap functions in a module"
            )
        # A module that stands in several places has a name for each.
        aliases = names.get(id(module), [])
        prefix = aliases.pop(0) if len(aliases) > 1 else next(iter(aliases), None)
        if prefix is None and any(True for _ in _state(module)):
            raise ModelError(
                f"entry {index} of the spine ({type(module).__name__}) has parameters or buffers "
                "but is not a submodule of the model; assign it to an attribute in __init__"
            )
        if prefix is None:
            prefix = f"spine.{index}"
        seen[prefix] = seen.get(prefix, 0) + 1
        name = prefix if seen[prefix] == 1 else f"{prefix}#{seen[prefix]}"
        yield NamedLayer(name or "model", prefix, module)


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _check_covered(model: nn.Module, layers: tuple[NamedLayer, ...]) -> None:
    covered = {id(tensor) for layer in layers for _, tensor in _state(layer.module)}
    missed = [name for name, tensor in _state(model) if id(tensor) not in covered]
    if missed:
        more = f" and {len(missed) - 3} more" if len(missed) > 3 else ""
        raise ModelError(
            f"no layer of the spine holds {', '.join(missed[:3])}{more}; it would silently not be "
            "trained. Move it into one of the layers, or add its module to the spine."
        )


@contextmanager
def evaluation_mode(*models: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; afterwards every module is in the mode it was in."""
    # A layer without state need not be a submodule of the model.
    training = {module for model in models for module in model.modules() if module.training}
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
