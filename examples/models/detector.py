"""A small detector: what is in an image, and where.

After YOLO (Redmon et al., arXiv:1506.02640, 2015, sections 2 and 2.2): each cell of the image says
in one pass whether something's centre is in it, its box and its class. The network is a small one
of our own, with a path from a finer resolution and one box per cell.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from examples.models.data import COLOURS, boxes
from examples.models.sizes import chosen

SIZES = {
    "paper": {"channels": (32, 64, 128, 256), "pixels": 224},
    "small": {"channels": (4, 8, 8, 8), "pixels": 32},
}
_CLASSES = len(COLOURS)


def _cells(pixels: int) -> int:
    return pixels // 8


def _halving(inputs: int, outputs: int) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.SiLU())


class Detector(nn.Module):
    """Four steps down, one up again to the resolution of the cells, and a head for each answer."""

    def __init__(self, channels: tuple[int, ...]) -> None:
        super().__init__()
        one, two, three, four = channels
        self.down = nn.Sequential(_halving(3, one), _halving(one, two), _halving(two, three))
        self.deep = _halving(three, four)
        self.beside = nn.Conv2d(three, four, 1)
        self.joined = nn.Conv2d(four, four, 3, padding=1)
        self.there = nn.Conv2d(four, 1, 1)
        self.box = nn.Conv2d(four, 4, 1)
        self.colour = nn.Conv2d(four, _CLASSES, 1)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        """[rows, 3, pixels, pixels] → for each of pixels / 8 × pixels / 8 cells, last: the logit
        that something is ``there``, its ``box`` (centre in the cell, height and width as parts of
        the image), the logits of its ``kind``."""
        fine = self.down(image)
        coarse = F.interpolate(self.deep(fine), scale_factor=2.0)
        value = F.silu(self.joined(self.beside(fine) + coarse))
        return {
            "there": self.there(value).squeeze(1),
            "box": self.box(value).movedim(1, -1).sigmoid(),
            "kind": self.colour(value).movedim(1, -1),
        }


def build(size: str = "paper", width: float = 1) -> Detector:
    """The detector.

    Args:
        size: ``"paper"``: for images of a usual size; or ``"small"``.
        width: a factor for all channels.
    """
    return Detector(chosen(SIZES, size, width)["channels"])


def batch(rows: int, size: str, draw: Generator) -> tuple[Tensor, Tensor]:
    """Bright rectangles, and where they are."""
    pixels = SIZES[size]["pixels"]
    return boxes(rows, pixels, _cells(pixels), draw)


def loss(output: dict[str, Tensor], targets: Tensor) -> Tensor:
    """What cells say wrongly, summed over cells (section 2.2), its mean over rows. Where nothing
    is, only ``there`` counts, and that less, since it is nearly everywhere."""
    there = targets[..., 0]
    seen = F.binary_cross_entropy_with_logits(output["there"], there, reduction="none")
    box = (output["box"] - targets[..., 1:5]).square().sum(-1)
    kind = F.cross_entropy(output["kind"].movedim(-1, 1), targets[..., 5].long(), reduction="none")
    wrong = torch.where(there > 0, seen + 5 * box + kind, 0.1 * seen)
    return wrong.sum((1, 2)).mean()
