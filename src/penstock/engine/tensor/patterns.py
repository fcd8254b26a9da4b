"""Which modules the keys of ``splits`` mean: layers by their names, or modules inside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from penstock.base.errors import ModelError
from penstock.engine.model.spine import NamedLayer
from penstock.engine.tracing.layers import CapturedLayer


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern means a name; ``*`` stands for anything between two dots.

    >>> matches("blocks.*.mlp.0", "blocks.11.mlp.0"), matches("blocks.*", "blocks.11.mlp.0")
    (True, False)
    """
    wanted, given = pattern.split("."), name.split(".")
    return len(wanted) == len(given) and all(map(fnmatchcase, given, wanted))


def inner_splits(layer: NamedLayer, splits: Mapping[str, str]) -> dict[str, str]:
    """How modules inside a layer are split, by their names in it.

    Args:
        splits: by patterns of qualified names.

    Raises:
        ModelError: two patterns say different things of one module.
    """
    inner: dict[str, str] = {}
    for path, _ in layer.module.named_modules():
        if not path:
            continue
        said = _said(named(layer, path), splits)
        if said not in ("", "whole", "any"):
            inner[path] = said
    return inner


def own_split(layer: NamedLayer, splits: Mapping[str, str]) -> str:
    """How a layer itself is split: by its name, or else by a pattern; ``"whole"`` if none says."""
    return splits.get(layer.name) or _said(layer.name, splits) or "whole"


def _said(name: str, splits: Mapping[str, str]) -> str:
    said = {how for pattern, how in splits.items() if matches(pattern, name)}
    if len(said) > 1:
        told = " and ".join(map(repr, sorted(said)))
        raise ModelError(f"splits say {told} of {name}; let only one pattern mean it")
    return said.pop() if said else ""


def named(layer: NamedLayer, path: str) -> str:
    """What splits call a module in a layer. Layers of a captured model hold modules under the names
    that these have in the model."""
    return path if isinstance(layer.module, CapturedLayer) else f"{layer.name}.{path}"


def check_used(layers: Sequence[NamedLayer], splits: Mapping[str, str]) -> None:
    """Raise ``ModelError`` for a key that means no module of these layers."""
    names = [
        named(layer, path) if path else layer.name
        for layer in layers
        for path, _ in layer.module.named_modules()
    ]
    for pattern in splits:
        if not any(matches(pattern, name) for name in names):
            raise ModelError(
                f"splits: {pattern!r} means no layer and no module of these layers; they have "
                f"{', '.join(map(repr, names[:8]))}{' …' if len(names) > 8 else ''}"
            )
