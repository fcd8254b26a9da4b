"""Inception v3.

Szegedy et al., arXiv:1512.00567, 2015, table 1 and figures 5, 6, 7 and 10. As in the authors' code,
all 5×5 convolutions but those of the first three modules are two of 3×3, and modules of figure 6
differ in width. Without the auxiliary classifier.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor, nn

from examples.models.data import digits
from examples.models.sizes import chosen, classified

SIZES = {
    "paper": {"width": 64, "classes": 1000, "pixels": 299},
    "small": {"width": 4, "classes": 10, "pixels": 75},
}
"""Widths are in units of the published network's: 64 are its own channels."""


class Convolution(nn.Sequential):
    """A convolution, batch norm and ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel: Any, **options: Any) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, bias=False, **options),
            nn.BatchNorm2d(outputs, eps=0.001),
            nn.ReLU(inplace=True),
        )


class Branches(nn.Module):
    """Modules that all see the same image; what they say stands side by side.

    Args:
        branches: by name.
    """

    def __init__(self, **branches: nn.Module) -> None:
        super().__init__()
        for name, branch in branches.items():
            self.add_module(name, branch)

    def forward(self, value: Tensor) -> Tensor:
        """[rows, channels, height, width] → the same with the channels of all branches."""
        return torch.cat([branch(value) for branch in self.children()], 1)


class Builder:
    """Makes the modules of a network of some width.

    Args:
        width: 64 for the published network.
    """

    def __init__(self, width: int) -> None:
        self._width = width

    def channels(self, published: int) -> int:
        """How many channels this network has where the published one has so many."""
        return max(1, published * self._width // 64)

    def chain(self, inputs: int, *steps: tuple[int, Any, dict[str, Any]]) -> nn.Sequential:
        """Convolutions in a row, each a tuple of published outputs, kernel and options."""
        layers = []
        for published, kernel, options in steps:
            layers.append(Convolution(inputs, self.channels(published), kernel, **options))
            inputs = self.channels(published)
        return nn.Sequential(*layers)

    def pooled(self, inputs: int, published: int) -> nn.Sequential:
        """An average over neighbours, and a 1×1 convolution."""
        convolution = Convolution(inputs, self.channels(published), 1)
        return nn.Sequential(nn.AvgPool2d(3, 1, 1), convolution)

    def split(self, inputs: int) -> Branches:
        """The 1×3 and 3×1 convolutions side by side of figure 7."""
        outputs = self.channels(384)
        return Branches(
            wide=Convolution(inputs, outputs, (1, 3), padding=(0, 1)),
            high=Convolution(inputs, outputs, (3, 1), padding=(1, 0)),
        )

    def fine(self, inputs: int, pooled: int) -> tuple[Branches, int]:
        """Figure 5: the modules on 35×35."""
        module = Branches(
            single=self.chain(inputs, (64, 1, {})),
            five=self.chain(inputs, (48, 1, {}), (64, 5, {"padding": 2})),
            threes=self.chain(
                inputs, (64, 1, {}), (96, 3, {"padding": 1}), (96, 3, {"padding": 1})
            ),
            pool=self.pooled(inputs, pooled),
        )
        return module, sum(map(self.channels, (64, 64, 96, pooled)))

    def factorised(self, inputs: int, inner: int) -> tuple[Branches, int]:
        """Figure 6: 7×7 convolutions in two parts, on 17×17."""
        wide, high = ((1, 7), {"padding": (0, 3)}), ((7, 1), {"padding": (3, 0)})
        module = Branches(
            single=self.chain(inputs, (192, 1, {})),
            seven=self.chain(inputs, (inner, 1, {}), (inner, *wide), (192, *high)),
            sevens=self.chain(
                inputs,
                (inner, 1, {}),
                *((inner, *high), (inner, *wide), (inner, *high), (192, *wide)),
            ),
            pool=self.pooled(inputs, 192),
        )
        return module, 4 * self.channels(192)

    def coarse(self, inputs: int) -> tuple[Branches, int]:
        """Figure 7: the widest modules, on 8×8."""
        three = nn.Sequential(
            *self.chain(inputs, (384, 1, {})),
            self.split(self.channels(384)),
        )
        threes = nn.Sequential(
            *self.chain(inputs, (448, 1, {}), (384, 3, {"padding": 1})),
            self.split(self.channels(384)),
        )
        module = Branches(
            single=self.chain(inputs, (320, 1, {})),
            three=three,
            threes=threes,
            pool=self.pooled(inputs, 192),
        )
        outputs = self.channels(320) + 4 * self.channels(384) + self.channels(192)
        return module, outputs

    def halved(self, inputs: int) -> tuple[Branches, int]:
        """Figure 10: from 35×35 to 17×17."""
        module = Branches(
            three=self.chain(inputs, (384, 3, {"stride": 2})),
            threes=self.chain(inputs, (64, 1, {}), (96, 3, {"padding": 1}), (96, 3, {"stride": 2})),
            pool=nn.MaxPool2d(3, 2),
        )
        return module, inputs + self.channels(384) + self.channels(96)

    def halved_again(self, inputs: int) -> tuple[Branches, int]:
        """From 17×17 to 8×8."""
        module = Branches(
            three=self.chain(inputs, (192, 1, {}), (320, 3, {"stride": 2})),
            seven=self.chain(
                inputs,
                (192, 1, {}),
                (192, (1, 7), {"padding": (0, 3)}),
                (192, (7, 1), {"padding": (3, 0)}),
                (192, 3, {"stride": 2}),
            ),
            pool=nn.MaxPool2d(3, 2),
        )
        return module, inputs + self.channels(320) + self.channels(192)


def build(size: str = "paper", width: float = 1) -> nn.Sequential:
    """[rows, 3, pixels, pixels] → logits [rows, classes]; the paper's has 24 million parameters.

    Args:
        size: ``"paper"`` or ``"small"``.
        width: a factor for all channels.
    """
    sizes = chosen(SIZES, size, width)
    make = Builder(sizes["width"])
    stem = make.chain(3, (32, 3, {"stride": 2}), (32, 3, {}), (64, 3, {"padding": 1}))
    wider = make.chain(make.channels(64), (80, 1, {}), (192, 3, {}))
    modules: list[nn.Module] = []
    channels = make.channels(192)
    kinds = [
        *((make.fine, 32), (make.fine, 64), (make.fine, 64), (make.halved,)),
        *((make.factorised, inner) for inner in (128, 160, 160, 192)),
        *((make.halved_again,), (make.coarse,), (make.coarse,)),
    ]
    for kind, *published in kinds:
        module, channels = kind(channels, *published)
        modules.append(module)
    return nn.Sequential(
        *(*stem, nn.MaxPool2d(3, 2), *wider, nn.MaxPool2d(3, 2)),
        *modules,
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.5)),
        nn.Linear(channels, sizes["classes"]),
    )


def batch(rows: int, size: str, draw: Generator) -> tuple[Tensor, Tensor]:
    """Digits that were drawn, and which they are."""
    return digits(rows, SIZES[size]["pixels"], draw)


loss = classified
