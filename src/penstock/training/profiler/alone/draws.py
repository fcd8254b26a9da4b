"""Whether a layer draws random numbers that only a whole value can have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from penstock.engine.model.randomness import RandomStream
from penstock.engine.tensor.divided_layers import DROPOUTS

_SEED = 0


@contextmanager
def watching_draws(module: nn.Module) -> Iterator[RandomStream]:
    """Within, ``drew`` of the stream tells whether a module draws but by dropout of torch's, of
    which tensor ranks know to keep the part of their rows."""
    with RandomStream(_SEED) as stream:
        before: list[bool] = []
        known = [one for one in module.modules() if isinstance(one, DROPOUTS)]
        hooks = [
            one.register_forward_pre_hook(lambda *_: before.append(stream.drew)) for one in known
        ]

        def forget(*_: object) -> None:
            stream.drew = before.pop()

        hooks += [one.register_forward_hook(forget) for one in known]
        try:
            yield stream
        finally:
            for hook in hooks:
                hook.remove()
