"""ResNet-50.

He et al., arXiv:1512.03385, 2015, table 1 (50 layers) and figure 5 (right). Where the number of
channels changes, the shortcut is a projection (option B), and the block's first 1×1 convolution has
the stride.
"""

from __future__ import annotations

from torch import Generator, Tensor, nn

from examples.models.data import digits
from examples.models.sizes import chosen, classified

SIZES = {
    "paper": {"blocks": (3, 4, 6, 3), "width": 64, "classes": 1000, "pixels": 224},
    "small": {"blocks": (1, 2), "width": 4, "classes": 10, "pixels": 32},
}
_EXPANSION = 4


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions, and a way around them."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * _EXPANSION
        self.reduce = nn.Conv2d(inputs, width, 1, stride, bias=False)
        self.reduce_norm = nn.BatchNorm2d(width)
        self.spatial = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.spatial_norm = nn.BatchNorm2d(width)
        self.expand = nn.Conv2d(width, outputs, 1, bias=False)
        self.expand_norm = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, value: Tensor) -> Tensor:
        """[rows, inputs, height, width] → [rows, 4 · width, height / stride, width / stride]."""
        inner = self.relu(self.reduce_norm(self.reduce(value)))
        inner = self.relu(self.spatial_norm(self.spatial(inner)))
        inner = self.expand_norm(self.expand(inner))
        inner += self.shortcut(value)
        return self.relu(inner)


class ResNet(nn.Module):
    """A stem, groups of bottlenecks that halve the resolution, and a classifier."""

    def __init__(self, blocks: tuple[int, ...], width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        groups, channels = [], width
        for group, count in enumerate(blocks):
            inner = width * 2**group
            for index in range(count):
                stride = 2 if group > 0 and index == 0 else 1
                groups.append(Bottleneck(channels, inner, stride))
                channels = inner * _EXPANSION
        self.blocks = nn.Sequential(*groups)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, image: Tensor) -> Tensor:
        """[rows, 3, pixels, pixels] → logits [rows, classes]."""
        value = self.pool(self.blocks(self.stem(image)))
        return self.classifier(value.flatten(1))


def build(size: str = "paper", width: float = 1) -> ResNet:
    """The model with 25.6 million parameters, or a small one.

    Args:
        size: ``"paper"`` or ``"small"``.
        width: a factor for all channels.
    """
    sizes = chosen(SIZES, size, width)
    return ResNet(sizes["blocks"], sizes["width"], sizes["classes"])


def batch(rows: int, size: str, draw: Generator) -> tuple[Tensor, Tensor]:
    """Digits that were drawn, and which they are."""
    return digits(rows, SIZES[size]["pixels"], draw)


loss = classified
