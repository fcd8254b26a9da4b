"""The layers of a model by their indices, in execution order: who reads what, and between which
layers of a very long model the exact search may cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from penstock.core.graph import LayerGraph


def sources_of(graph: LayerGraph) -> list[list[int]]:
    """The layers whose outputs each layer reads: the layer before it where it names none."""
    place = _places(graph)
    return [
        ([index - 1] if index else [])
        if layer.inputs is None
        else [place[name] for name in layer.inputs]
        for index, layer in enumerate(graph.layers)
    ]


def reads_of(graph: LayerGraph) -> tuple[tuple[int, int], ...]:
    """(producer, reader) of every output that a layer reads."""
    return tuple(
        (source, reader) for reader, sources in enumerate(sources_of(graph)) for source in sources
    )


def skips_of(graph: LayerGraph) -> tuple[tuple[int, int, int], ...]:
    """(producer, reader, bytes) of every skip; without bytes for what only has to come before."""
    place = _places(graph)
    return tuple(
        (index, place[name], size)
        for index, layer in enumerate(graph.layers)
        for name, size in layer.skip_bytes.items()
    ) + tuple(
        (place[name], index, 0) for index, layer in enumerate(graph.layers) for name in layer.after
    )


def handed_on(graph: LayerGraph) -> Iterator[tuple[int, list[int], int]]:
    """(producer, readers, bytes) of every skip and of every output that is read."""
    for source, reader, num_bytes in skips_of(graph):
        yield source, [reader], num_bytes
    readers: list[list[int]] = [[] for _ in graph.layers]
    for source, reader in reads_of(graph):
        readers[source].append(reader)
    for index, layer in enumerate(graph.layers):
        if readers[index]:
            yield index, readers[index], layer.output_bytes


def _places(graph: LayerGraph) -> dict[str, int]:
    return {layer.name: index for index, layer in enumerate(graph.layers)}


def places_near(cuts: Sequence[int], num_layers: int, most: int) -> set[int]:
    """Places around the inner ones of some cuts, about ``most`` in all."""
    inner = cuts[1:-1]
    reach = max(1, most // (2 * max(1, len(inner))))
    return {
        place
        for cut in inner
        for place in range(max(1, cut - reach), min(num_layers, cut + reach + 1))
    }


def spread_places(graph: LayerGraph, most: int) -> set[int]:
    """Places between which there is equally much: of compute, and of bytes half as much. Where
    that leaves some over, because a few layers have almost everything, the rest lie evenly between
    the others."""
    layers = graph.layers
    held = [
        layer.activation_bytes + layer.parameter_bytes + layer.optimizer_bytes for layer in layers
    ]
    compute = [layer.compute_seconds for layer in layers]
    shares = zip(_shares(compute), _shares(held), strict=True)
    sums = list(accumulate(2 * seconds + num_bytes for seconds, num_bytes in shares))
    gap = max(sums[-1], 1e-9) / most
    places = {
        index + 1
        for index, (before, now) in enumerate(pairwise((0.0, *sums)))
        if int(before / gap) < int(now / gap) and index + 1 < len(layers)
    }
    rest = [index for index in range(1, len(layers)) if index not in places]
    missing = most - len(places)
    steps = range(1, 2 * missing, 2)
    return places | {rest[step * len(rest) // (2 * missing)] for step in steps}


def _shares(numbers: Sequence[float]) -> list[float]:
    """Each number over the sum of all, which may be 0."""
    total = sum(numbers) or 1.0
    return [number / total for number in numbers]
