"""Which modules the keys of ``splits`` mean: layers by their names, or modules inside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from penstock.errors import ModelError
from penstock.model.spine import NamedLayer


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
        said = {how for pattern, how in splits.items() if matches(pattern, f"{layer.name}.{path}")}
        if len(said) > 1:
            told = " and ".join(map(repr, sorted(said)))
            raise ModelError(
                f"splits say {told} of {layer.name}.{path}; let only one pattern mean it"
            )
        if said - {"whole", "any"}:
            inner[path] = said.pop()
    return inner


def check_used(layers: Sequence[NamedLayer], splits: Mapping[str, str]) -> None:
    """Raise ``ModelError`` for a key that means no module of these layers."""
    names = [
        f"{layer.name}.{path}" if path else layer.name
        for layer in layers
        for path, _ in layer.module.named_modules()
    ]
    for pattern in splits:
        if not any(matches(pattern, name) for name in names):
            raise ModelError(
                f"splits: {pattern!r} means no layer and no module of these layers; they have "
                f"{', '.join(map(repr, names[:8]))}{' …' if len(names) > 8 else ''}"
            )
