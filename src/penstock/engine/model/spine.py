"""A model's spine: the layers it runs, one after another.

A pipeline can cut a model only where a single value passes from one layer to the next. An
``nn.Sequential`` is such a chain; any other module names its chain in a ``spine`` attribute or
method::

    class GPT(nn.Module):
        def spine(self):
            return [self.embedding, *self.blocks, self.head]

What one layer leaves for another beyond the next is a skip, and is named on both sides::

    class Down(nn.Module):
        stashes = ("wide",)

        def forward(self, value):
            return self.shrink(value), {"wide": value}

    class Up(nn.Module):
        recalls = ("wide",)

        def forward(self, value, wide):
            return self.grow(value) + wide

The model's own ``forward`` may then be ``return run_spine(self.spine(), value)``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from keyword import iskeyword
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from penstock.base.errors import ModelError
from penstock.base.values import expect
from penstock.core.graph import fingerprint
from penstock.engine.model import tree

_HOW = (
    "Give the model a method `spine(self)` that returns its layers in execution order, for example "
    "`return [self.embedding, *self.blocks, self.head]`, each taking the previous one's output; or "
    "make it an nn.Sequential. Or let Penstock trace it, before it is profiled: `model = "
    "penstock.capture(model, inputs)`; penstock.profile does that for itself, so give Pipeline the "
    "captured model too."
)


class NamedLayer(NamedTuple):
    """One layer of a spine.

    Attributes:
        name: unique within the spine.
        prefix: the module's qualified name in the model; empty if it is the model itself.
        module: the layer.
    """

    name: str
    prefix: str
    module: nn.Module

    def key(self, own: str) -> str:
        """The key in the model's ``state_dict`` of what the module calls ``own``."""
        return f"{self.prefix}.{own}" if self.prefix else own

    @property
    def signature(self) -> str:
        """Shapes and dtypes of the parameters, by which a plan recognises its model."""
        return ",".join(
            f"{name}:{'x'.join(map(str, parameter.shape))}:{str(parameter.dtype)[6:]}"
            for name, parameter in self.module.named_parameters()
        )

    @property
    def stashes(self) -> tuple[str, ...]:
        """Keys of the skips that the layer leaves for later ones."""
        return _keys(self, "stashes")

    @property
    def recalls(self) -> tuple[str, ...]:
        """Keys of the skips that the layer takes from earlier ones."""
        return _keys(self, "recalls")


def uncompiled(model: Any) -> Any:
    """What ``torch.compile`` was given to make a model, as a whole, of; the model itself if it was
    not made so. A pipeline calls layers, which may be compiled themselves."""
    # Its class takes torch's compiler to import.
    wraps = isinstance(model, nn.Module) and type(model).__name__ == "OptimizedModule"
    return model._orig_mod if wraps else model


def names_a_spine(model: nn.Module) -> bool:
    """Whether a model says itself which layers it runs, one after another."""
    model = uncompiled(model)
    chained = isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward
    return chained or hasattr(model, "spine")


def spine_of(model: nn.Module) -> tuple[NamedLayer, ...]:
    """The layers of ``model`` in execution order.

    Raises:
        ModelError: it names no spine, an entry is not a module, or a parameter or buffer of the
            model is in no layer (it would silently not be trained), or has no shape yet; or its
            skips do not fit together.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"the model is a {type(model).__name__}, not an nn.Module. {_HOW}")
    model = uncompiled(model)
    _check_initialised(model)
    layers = tuple(_named(model, _modules(model)))
    if not layers:
        raise ModelError(f"the spine of {type(model).__name__} has no layers. {_HOW}")
    _check_covered(model, layers)
    _check_skips(layers)
    return layers


def _check_initialised(model: nn.Module) -> None:
    for name, module in model.named_modules():
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if any(map(is_lazy, own)):
            raise ModelError(
                f"layer {name!r} ({type(module).__name__}) has no shapes yet: call the model once, "
                "model(sample), before it is profiled or trained"
            )


class Skip(NamedTuple):
    """A value that a layer stashed, and how often each of its tensors had been overwritten."""

    value: Any
    versions: tuple[int, ...]

    @classmethod
    def of(cls, value: Any) -> Skip:
        """Stash a value as it is now."""
        return cls(value, _versions(value))

    def taken(self, key: str) -> Any:
        """The value, for the layer that recalls ``key``.

        Raises:
            ModelError: it was overwritten in place. Whether the layer would see that depended on
                where the model is cut.
        """
        if _versions(self.value) != self.versions:
            raise ModelError(
                f"the skip {key!r} was overwritten in place between the layer that stashes it and "
                "the one that recalls it; stash a clone, or do not work in place there"
            )
        return self.value


def run_layer(layer: NamedLayer, value: Any, skips: dict[str, Skip]) -> Any:
    """Run one layer of a spine.

    Args:
        layer: called with ``value``, and the skips it recalls by keyword.
        value: the output of the layer before.
        skips: those stashed so far; what the layer recalls is taken out, what it stashes put in.

    Raises:
        ModelError: it does not return the skips that it says it stashes, or another layer has
            overwritten what it recalls.
    """
    recalled = {key: skips.pop(key).taken(key) for key in layer.recalls}
    output, stashed = call_layer(layer, value, recalled)
    skips.update((key, Skip.of(skip)) for key, skip in stashed.items())
    return output


def _versions(value: Any) -> tuple[int, ...]:
    # Tensors made in inference mode count no versions.
    return tuple(0 if tensor.is_inference() else tensor._version for tensor in tree.tensors(value))


def run_spine(modules: Iterable[nn.Module], value: Any) -> Any:
    """Run the layers of a spine on one device, handing skips over.

    Args:
        modules: in execution order, as ``spine`` gives them.
        value: the first layer's input.

    Returns:
        The last layer's output.

    Raises:
        ModelError: the skips do not fit together.

    >>> import torch
    >>> run_spine([nn.Identity(), nn.Flatten(0)], torch.ones(2, 3)).shape
    torch.Size([6])
    """
    expect(modules, Iterable, "the spine", "give its layers in execution order")
    skips: dict[str, Skip] = {}
    layers = [
        NamedLayer(f"{index} ({type(module).__name__})", "", module)
        for index, module in enumerate(modules)
    ]
    for layer in layers:
        expect(layer.module, nn.Module, f"entry {layer.name} of the spine", "wrap functions")
    _check_skips(layers)
    for layer in layers:
        value = run_layer(layer, value, skips)
    return value


def _check_skips(layers: Sequence[NamedLayer]) -> None:
    stashed: dict[str, str] = {}
    recalled: dict[str, str] = {}
    for layer in layers:
        # A layer runs with what it recalls before it leaves what it stashes.
        for key in layer.recalls:
            if key in recalled:
                raise ModelError(
                    f"layers {recalled[key]!r} and {layer.name!r} both recall {key!r}; let the "
                    "first stash it again under another name"
                )
            if key not in stashed:
                raise ModelError(
                    f"layer {layer.name!r} recalls {key!r}, which no layer before it stashes"
                )
            recalled[key] = layer.name
        for key in layer.stashes:
            if key in stashed:
                raise ModelError(
                    f"layers {stashed[key]!r} and {layer.name!r} both stash {key!r}; give every "
                    "skip a name of its own"
                )
            stashed[key] = layer.name
    for key in stashed.keys() - recalled.keys():
        raise ModelError(
            f"layer {stashed[key]!r} stashes {key!r}, which no layer after it recalls; remove it, "
            f"or name it in the `recalls` of the layer that takes it"
        )


def call_layer(
    layer: NamedLayer, value: Any, recalled: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Call one layer; gives its output and the skips that it stashes.

    Raises:
        ModelError: it does not return the skips that it says it stashes.
    """
    return parted(layer, layer.module(value, **recalled))


def parted(layer: NamedLayer, result: Any) -> tuple[Any, dict[str, Any]]:
    """Take what a layer returned apart into its output and the skips that it stashes.

    Raises:
        ModelError: it is not what the layer says it stashes.
    """
    if not layer.stashes:
        return result, {}
    match result:
        case tuple((output, dict(stashed))) if set(stashed) == set(layer.stashes):
            return output, stashed
    shape = ", ".join(f"{key!r}: …" for key in layer.stashes)
    raise ModelError(
        f"layer {layer.name!r} says it stashes {', '.join(layer.stashes)}, so it must return "
        f"(output, {{{shape}}}), but it returned a {type(result).__name__}"
    )


def spine_fingerprint(layers: Iterable[NamedLayer]) -> str:
    """The fingerprint of the profile of these layers."""
    return fingerprint((layer.name, layer.signature) for layer in layers)


def _keys(layer: NamedLayer, attribute: str) -> tuple[str, ...]:
    keys: object = getattr(layer.module, attribute, ())
    if not isinstance(keys, tuple | list) or not all(
        isinstance(key, str) and key.isidentifier() and not iskeyword(key) for key in keys
    ):
        raise ModelError(
            f"layer {layer.name!r} has {attribute} = {keys!r}; they must be a tuple of names that "
            "could be arguments of a function"
        )
    return tuple(keys)


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
        given: object = getattr(module, "spine_name", None)
        if isinstance(given, str):  # it holds its state under the full names of the model
            yield NamedLayer(given, "", module)
            continue
        # A module that stands in several places has a name for each.
        aliases = names.get(id(module), [])
        prefix = aliases.pop(0) if len(aliases) > 1 else next(iter(aliases), None)
        if prefix is None and any(True for _ in state_of(module)):
            raise ModelError(
                f"entry {index} of the spine ({type(module).__name__}) has parameters or buffers "
                "but is not a submodule of the model; assign it to an attribute in __init__"
            )
        if prefix is None:
            prefix = f"spine.{index}"
        seen[prefix] = seen.get(prefix, 0) + 1
        name = prefix if seen[prefix] == 1 else f"{prefix}#{seen[prefix]}"
        yield NamedLayer(name or "model", prefix, module)


def state_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of a module by all names that they have."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _check_covered(model: nn.Module, layers: tuple[NamedLayer, ...]) -> None:
    covered = {id(tensor) for layer in layers for _, tensor in state_of(layer.module)}
    missed = [name for name, tensor in state_of(model) if id(tensor) not in covered]
    if missed:
        more = f" and {len(missed) - 3} more" if len(missed) > 3 else ""
        raise ModelError(
            f"no layer of the spine holds {', '.join(missed[:3])}{more}; it would silently not be "
            "trained. Move it into one of the layers, or add its module to the spine."
        )


@contextmanager
def evaluation_mode(*models: nn.Module) -> Iterator[None]:
    """A context in which models are in evaluation mode; modules get back the modes they had."""
    # A layer without state need not be a submodule of the model.
    modes = {module: module.training for model in models for module in model.modules()}
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            if module.training != training:
                # By its own method, as it was switched: a module may do more there than note the
                # mode, such as switch layers that are no children of it.
                module.train(training)
        for module, training in modes.items():
            if module.training != training:  # by a parent that was odd
                module.training = training
