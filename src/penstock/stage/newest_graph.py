"""The one graph of a stage whose backwards go through the newest activations.

A gradient that comes back belongs to an earlier microbatch, whose graph is gone. It goes through
that of the microbatch that the stage has just run, which must have the same shapes.

Malinowski et al., "Sideways: Depth-Parallel Training of Video Models", CVPR 2020, arXiv 2001.06232;
Meloni et al., "PARTIME: Scalable and Parallel Processing Over Time with Deep Neural Networks",
arXiv 2210.09147.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.errors import InputError
from penstock.stage.microbatch_graph import Gradients, MicrobatchGraph


class NewestGraph:
    """Keeps what the last forward has left, and nothing else.

    Args:
        stage: the number of the stage, for errors.
        age: how many microbatches older gradients are than the graph that they go through.

    Attributes:
        num_dropped: how many backwards had gradients and found no graph.
    """

    def __init__(self, stage: int, age: int) -> None:
        self.num_dropped = 0
        self._stage = stage
        self._age = age
        self._microbatch = -1
        self._graph: MicrobatchGraph | None = None

    @property
    def there(self) -> bool:
        """Whether there is a graph."""
        return self._graph is not None

    def of(self, microbatch: int) -> MicrobatchGraph | None:
        """The graph, if it is that of a microbatch."""
        return self._graph if self._microbatch == microbatch else None

    def replace(self, microbatch: int, graph: MicrobatchGraph | None) -> None:
        """Forget the last graph, and keep this one; ``None`` if the forward has left none."""
        self._microbatch, self._graph = microbatch, graph

    def take(
        self, microbatch: int, gradients: Gradients, skip_gradients: Mapping[str, Gradients]
    ) -> MicrobatchGraph | None:
        """What the gradients of a microbatch go through; nobody else will.

        Returns:
            ``None`` if there are no gradients, or nothing that they could go through: the stream
            has ended, so that no microbatch came any more, or the one that came is one that nobody
            learns from.

        Raises:
            InputError: the newest microbatch has other shapes.
        """
        every = [gradients, *skip_gradients.values()]
        if all(gradient is None for each in every for gradient in each):
            return None
        graph, self._graph = self._graph, None
        if graph is None or self._microbatch - microbatch != self._age:
            self.num_dropped += 1
            return None
        self._check_shapes(microbatch, graph, gradients)
        return graph

    def _check_shapes(self, microbatch: int, graph: MicrobatchGraph, gradients: Gradients) -> None:
        for edge, gradient in zip(graph.outputs, gradients, strict=True):
            if edge is None or gradient is None:
                continue
            made = tuple(edge.node._input_metadata[edge.output_nr].shape)
            if tuple(gradient.shape) != made:
                raise InputError(
                    f"stage {self._stage} has made {made} of frame {self._microbatch}, "
                    f"through which the gradient of frame {microbatch} is to go, but that has "
                    f"shape {tuple(gradient.shape)}; frames of a stream must have the same shape: "
                    "resize them, or close the stream and begin another"
                )
