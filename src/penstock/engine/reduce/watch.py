"""``GradientWatch``: which gradients are complete while the last backward of a round still runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from penstock.engine.device.accelerators import is_on_host


class GradientWatch:
    """Tells which gradients are complete, on a CPU. One that is made in several steps is complete
    after as many as it took in the round before, so that the first round tells nothing.

    Args:
        parameters: those of which gradients may be watched.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._places: tuple[int, ...] = ()
        self._times_made: Counter[int] = Counter()

    @contextmanager
    def watching(
        self, places: Iterable[int], complete: Callable[[int], None], again: Callable[[int], None]
    ) -> Iterator[None]:
        """Within, the last gradients of a round are made.

        Args:
            places: the parameters that are trained, by their number.
            complete: called with each whose gradient is complete.
            again: called with each whose gradient is added to although it seemed to be complete,
                since the model computes otherwise than in the round before.
        """
        trained = tuple(places)
        expected = self._times_made if trained == self._places else Counter()
        self._places, self._times_made = trained, Counter()
        times_made = self._times_made

        def made(place: int, _: Tensor) -> None:
            times_made[place] += 1
            if times_made[place] == expected[place]:
                complete(place)
            elif times_made[place] > expected[place] > 0:
                again(place)

        hooks = [
            _when_made(self._parameters[place], partial(made, place))
            for place in trained
            # Elsewhere gradients are made later than it seems, and by other threads.
            if is_on_host(self._parameters[place].device)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _when_made(parameter: nn.Parameter, then: Callable[[Tensor], None]) -> RemovableHandle:
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(then)  # type: ignore[no-untyped-call]
    return handle
