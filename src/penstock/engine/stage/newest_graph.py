"""The one graph of a stage whose backwards go through the newest activations.

A gradient that comes back belongs to an earlier microbatch, whose graph is gone. It goes through
that of the microbatch that the stage has just run, which must have the same shapes.

Malinowski et al., "Sideways: Depth-Parallel Training of Video Models", CVPR 2020, arXiv 2001.06232;
Meloni et al., "PARTIME: Scalable and Parallel Processing Over Time with Deep Neural Networks",
arXiv 2210.09147.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.base.errors import InputError
from penstock.engine.stage.microbatch_graph import Gradients, Produced, check_finite
from penstock.engine.stage.protocol import StageGraph


class NewestGraph:
    """Keeps what the last forward has left, and nothing else.

    Args:
        stage: the number of the stage, for errors.
        age: how many microbatches older gradients are than the graph that they go through.

    Attributes:
        num_dropped: how many backwards had gradients and found no graph.
        microbatch: the number of the one whose graph it is.
        stays_finite: whether a microbatch that is not finite is refused: gradients of others would
            go through it long before its own loss is known.
    """

    def __init__(self, stage: int, age: int) -> None:
        self.num_dropped = 0
        self.microbatch = -1
        self.stays_finite = False
        self._stage = stage
        self._age = age
        self._graph: StageGraph | None = None

    @property
    def there(self) -> bool:
        """Whether there is a graph."""
        return self._graph is not None

    def of(self, microbatch: int) -> StageGraph | None:
        """The graph, if it is that of a microbatch."""
        return self._graph if self.microbatch == microbatch else None

    def forget(self) -> None:
        """Forget the last graph."""
        self.microbatch, self._graph = -1, None

    def replace(self, microbatch: int, graph: StageGraph | None, produced: Produced) -> None:
        """Forget the last graph, and keep this one; ``None`` if the forward has left none.

        Raises:
            NotFinite: what the forward has produced is not finite, and gradients of others would
                have gone through it.
        """
        self.forget()
        if graph is not None and self.stays_finite and self._age:
            name = f"the output of stage {self._stage}"
            # A mask may be infinite, and no gradient comes back through it.
            check_finite(microbatch, name, graph.differentiated(produced))
        self.microbatch, self._graph = microbatch, graph

    def take(
        self, microbatch: int, gradients: Gradients, skip_gradients: Mapping[str, Gradients]
    ) -> StageGraph | None:
        """The graph that the gradients of a microbatch go through; nobody else will.

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
        if graph is None or self.microbatch - microbatch != self._age:
            self.num_dropped += 1
            return None
        self._check_shapes(microbatch, graph, gradients)
        return graph

    def _check_shapes(self, microbatch: int, graph: StageGraph, gradients: Gradients) -> None:
        for made, gradient in zip(graph.output_shapes, gradients, strict=True):
            if made is not None and gradient is not None and tuple(gradient.shape) != made:
                raise InputError(
                    f"stage {self._stage} has made {made} of microbatch {self.microbatch}, "
                    f"through which the gradient of microbatch {microbatch} is to go, but that has "
                    f"shape {tuple(gradient.shape)}; frames of a stream must have the same shape: "
                    "resize them, or close the stream and begin another"
                )
