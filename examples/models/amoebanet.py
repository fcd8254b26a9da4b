"""AmoebaNet-D, the network that GPipe was made for.

Real et al., arXiv:1802.01548, 2018, in the sizes of GPipe (Huang et al., arXiv:1811.06965, table
1). States of a normal cell are joined as in the authors' code, not as in their picture: those give
the sizes of GPipe's table.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from examples.models.data import digits
from examples.models.sizes import chosen, classified

SIZES = {
    "paper": {"layers": 18, "width": 208, "classes": 1000, "pixels": 224},
    "small": {"layers": 3, "width": 16, "classes": 10, "pixels": 32},
}

# Of each pair: which state is read, and by what; the sum of both is a new state.
_NORMAL = (
    ((1, "1x1"), (1, "max 3x3")),
    ((1, "none"), (0, "1x7 7x1")),
    ((0, "1x1"), (0, "1x7 7x1")),
    ((2, "max 3x3"), (2, "none")),
    ((1, "average 3x3"), (5, "1x1")),
)
_REDUCTION = (
    ((0, "max 2x2"), (0, "max 3x3")),
    ((2, "none"), (1, "3x3")),
    ((2, "1x7 7x1"), (2, "max 3x3")),
    ((3, "none"), (1, "max 2x2")),
    ((2, "average 3x3"), (3, "1x1")),
)
_NORMAL_JOINED, _REDUCTION_JOINED = (0, 3, 4, 6), (4, 5, 6)


def _convolutions(*steps: tuple[int, int, tuple[int, int], tuple[int, int]]) -> nn.Sequential:
    """ReLU, convolution and batch norm for each step: inputs, outputs, kernel and stride."""
    layers: list[nn.Module] = []
    for inputs, outputs, kernel, stride in steps:
        padding = (kernel[0] // 2, kernel[1] // 2)
        convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
        layers += [nn.ReLU(), convolution, nn.BatchNorm2d(outputs)]
    return nn.Sequential(*layers)


def _pointwise(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return _convolutions((inputs, outputs, (1, 1), (stride, stride)))


class Halved(nn.Module):
    """Half the resolution: two 1×1 convolutions that see every other pixel, one of them those that
    the other does not."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(inputs, outputs // 2, 1, 2, bias=False)
        self.odd = nn.Conv2d(inputs, outputs - outputs // 2, 1, 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, value: Tensor) -> Tensor:
        """[rows, inputs, height, width] → [rows, outputs, height / 2, width / 2]."""
        value = value.relu()
        shifted = F.pad(value[:, :, 1:, 1:], (0, 1, 0, 1))
        return self.norm(torch.cat([self.even(value), self.odd(shifted)], 1))


def _operation(kind: str, channels: int, stride: int) -> nn.Module:
    inner = channels // 4
    match kind:
        case "none":
            return nn.Identity() if stride == 1 else Halved(channels, channels)
        case "1x1":
            return _pointwise(channels, channels, stride)
        case "max 2x2":
            return nn.MaxPool2d(2, stride)
        case "max 3x3":
            return nn.MaxPool2d(3, stride, padding=1)
        case "average 3x3":
            return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)
        case "3x3":
            middle = [(inner, inner, (3, 3), (stride, stride))]
        case _:
            middle = [(inner, inner, (1, 7), (1, stride)), (inner, inner, (7, 1), (stride, 1))]
    return _convolutions(
        (channels, inner, (1, 1), (1, 1)), *middle, (inner, channels, (1, 1), (1, 1))
    )


class Cell(nn.Module):
    """Five sums of two operations each.

    Args:
        before_last, last: channels of the two cells before.
        channels: of each state.
        reduction: whether it halves the resolution.
        after_reduction: whether the cell before did.
    """

    def __init__(
        self, before_last: int, last: int, channels: int, reduction: bool, after_reduction: bool
    ) -> None:
        super().__init__()
        pairs = _REDUCTION if reduction else _NORMAL
        self.joined = _REDUCTION_JOINED if reduction else _NORMAL_JOINED
        self.reads = tuple(state for pair in pairs for state, _ in pair)
        self.last = _pointwise(last, channels)
        self.before_last: nn.Module = nn.Identity()
        if after_reduction:
            self.before_last = Halved(before_last, channels)
        elif before_last != channels:
            self.before_last = _pointwise(before_last, channels)
        self.operations = nn.ModuleList(
            _operation(kind, channels, 2 if reduction and state < 2 else 1)
            for pair in pairs
            for state, kind in pair
        )

    def forward(self, before_last: Tensor, last: Tensor) -> Tensor:
        """[rows, channels, height, width] of two cells → that of this one."""
        states = [self.last(last), self.before_last(before_last)]
        for first in range(0, len(self.operations), 2):
            made = [
                self.operations[place](states[self.reads[place]]) for place in (first, first + 1)
            ]
            states.append(made[0] + made[1])
        return torch.cat([states[state] for state in self.joined], 1)


class AmoebaNet(nn.Module):
    """A stem, three groups of normal cells with a reduction between, and a classifier."""

    def __init__(self, layers: int, width: int, classes: int) -> None:
        super().__init__()
        channels = width // 4
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels, 3, 2, 1, bias=False), nn.BatchNorm2d(channels)
        )
        group = [False] * (layers // 3)
        reductions = [True, True, *group, True, *group, True, *group]
        cells = []
        before_last = last = channels
        after = False
        for reduction in reductions:
            channels *= 2 if reduction else 1
            cells.append(Cell(before_last, last, channels, reduction, after))
            before_last, last = last, channels * len(cells[-1].joined)
            after = reduction
        self.cells = nn.ModuleList(cells)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(last, classes)

    def forward(self, image: Tensor) -> Tensor:
        """[rows, 3, pixels, pixels] → logits [rows, classes]."""
        before_last = last = self.stem(image)
        for cell in self.cells:
            before_last, last = last, cell(before_last, last)
        return self.classifier(self.pool(last).flatten(1))


def build(size: str = "paper", width: float = 1) -> AmoebaNet:
    """The network of GPipe's first column with 82 million parameters, or a small one.

    Args:
        size: ``"paper"`` or ``"small"``.
        width: a factor for all channels.
    """
    sizes = chosen(SIZES, size, width)
    return AmoebaNet(sizes["layers"], sizes["width"], sizes["classes"])


def batch(rows: int, size: str, draw: Generator) -> tuple[Tensor, Tensor]:
    """Digits that were drawn, and which they are."""
    return digits(rows, SIZES[size]["pixels"], draw)


loss = classified
