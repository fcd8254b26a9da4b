"""What of a model no stage runs: the model itself, and modules around its layers.

A pipeline calls the layers of the spine, each on its rank, and nothing else. What the caller does
to modules around them would have no effect, and nothing would look wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from penstock.base.errors import ModelError
from penstock.engine.model.spine import NamedLayer
from penstock.engine.run.elsewhere import Elsewhere

_CALLED_WITH_FORWARD = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)


class Outside:
    """Watches the modules of a model that are in no layer.

    Args:
        model: as given to ``Pipeline``.
        layers: its spine.
    """

    def __init__(self, model: nn.Module, layers: Iterable[NamedLayer]) -> None:
        inside = {id(module) for layer in layers for module in layer.module.modules()}
        # A captured model's layers are traces, in which hooks of its containers may be already.
        around = [("", model)] if hasattr(model, "original") else model.named_modules()
        self._modules = [
            (name or "the model", module, _children(module))
            for name, module in around
            if id(module) not in inside
        ]

    def check(self) -> None:
        """Raise ``ModelError`` if something was done to these modules that no stage would see."""
        for name, module, children in self._modules:
            for hook in _hooks(module):
                raise ModelError(
                    f"{name} ({type(module).__name__}) has the hook {hook!r}, which would never be "
                    "called: a pipeline runs the layers of the spine, and not what is around them; "
                    "register it on a layer"
                )
            if _children(module) != children:
                raise ModelError(
                    f"{name} ({type(module).__name__}) has got other layers since the Pipeline was "
                    "built, which it would not train; change the model before, or build a new "
                    "Pipeline"
                )


def _children(module: nn.Module) -> tuple[tuple[str, int], ...]:
    return tuple((name, id(child)) for name, child in module._modules.items())


def _hooks(module: nn.Module) -> Iterator[object]:
    for kind in _CALLED_WITH_FORWARD:
        for hook in getattr(module, kind).values():
            if not isinstance(getattr(hook, "__self__", None), Elsewhere):
                yield hook
