"""Who reads what in a model: its layers by their indices, in execution order."""

from __future__ import annotations

from collections.abc import Iterator

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
