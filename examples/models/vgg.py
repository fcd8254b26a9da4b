"""VGG-16.

Simonyan, Zisserman, arXiv:1409.1556, 2014, table 1, configuration D. Almost all of its 138 million
parameters are in the linear layers, almost all of its work in the convolutions.
"""

from __future__ import annotations

from torch import Generator, Tensor, nn

from examples.models.data import digits
from examples.models.sizes import chosen, classified

SIZES = {
    "paper": {"width": 64, "hidden": 4096, "classes": 1000, "pixels": 224},
    "small": {"width": 2, "hidden": 16, "classes": 10, "pixels": 32},
}
# Convolutions between two poolings, and channels in units of the width.
_GROUPS = ((2, 1), (2, 2), (3, 4), (3, 8), (3, 8))


def build(size: str = "paper", width: float = 1) -> nn.Sequential:
    """[rows, 3, pixels, pixels] → logits [rows, classes].

    Args:
        size: ``"paper"`` or ``"small"``.
        width: a factor for all channels.
    """
    sizes = chosen(SIZES, size, width)
    layers: list[nn.Module] = []
    channels, pixels = 3, sizes["pixels"]
    for count, factor in _GROUPS:
        for _ in range(count):
            outputs = sizes["width"] * factor
            layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.ReLU(inplace=True)]
            channels = outputs
        layers.append(nn.MaxPool2d(2))
        pixels //= 2
    hidden = sizes["hidden"]
    layers.append(nn.Flatten())
    for inputs in (channels * pixels**2, hidden):
        layers += [nn.Linear(inputs, hidden), nn.ReLU(inplace=True), nn.Dropout(0.5)]
    return nn.Sequential(*layers, nn.Linear(hidden, sizes["classes"]))


def batch(rows: int, size: str, draw: Generator) -> tuple[Tensor, Tensor]:
    """Digits that were drawn, and which they are."""
    return digits(rows, SIZES[size]["pixels"], draw)


loss = classified
