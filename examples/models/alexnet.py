"""AlexNet.

Krizhevsky, Sutskever, Hinton, NeurIPS 2012, section 3. Layers whose halves do not talk on the
paper's two GPUs are convolutions of two groups.
"""

from __future__ import annotations

from torch import Generator, Tensor, nn

from examples.models.data import digits
from examples.models.sizes import chosen, classified

SIZES = {
    "paper": {"channels": (96, 256, 384, 384, 256), "hidden": 4096, "classes": 1000, "pixels": 224},
    "small": {"channels": (4, 8, 8, 8, 4), "hidden": 16, "classes": 10, "pixels": 64},
}


def _normalise() -> nn.LocalResponseNorm:
    # Section 3.3: n = 5, α = 1e-4, β = 0.75, k = 2; torch divides α by n.
    return nn.LocalResponseNorm(5, alpha=5e-4, beta=0.75, k=2.0)


def build(size: str = "paper", width: float = 1) -> nn.Sequential:
    """[rows, 3, pixels, pixels] → logits [rows, classes]; the paper's has 61 million parameters.

    Args:
        size: ``"paper"`` or ``"small"``.
        width: a factor for all channels.
    """
    sizes = chosen(SIZES, size, width)
    one, two, three, four, five = sizes["channels"]
    hidden = sizes["hidden"]
    features = [
        *(nn.Conv2d(3, one, 11, stride=4, padding=2), nn.ReLU(), _normalise()),
        nn.MaxPool2d(3, 2),
        *(nn.Conv2d(one, two, 5, padding=2, groups=2), nn.ReLU(), _normalise()),
        nn.MaxPool2d(3, 2),
        *(nn.Conv2d(two, three, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(three, four, 3, padding=1, groups=2), nn.ReLU()),
        *(nn.Conv2d(four, five, 3, padding=1, groups=2), nn.ReLU()),
        nn.MaxPool2d(3, 2),
        nn.Flatten(),
    ]
    side = _side_after_features(sizes["pixels"])
    return nn.Sequential(
        *features,
        *(nn.Linear(five * side**2, hidden), nn.ReLU(), nn.Dropout(0.5)),
        *(nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(0.5)),
        nn.Linear(hidden, sizes["classes"]),
    )


def _side_after_features(pixels: int) -> int:
    side = (pixels + 4 - 11) // 4 + 1
    for _ in range(3):
        side = (side - 3) // 2 + 1
    return side


def batch(rows: int, size: str, draw: Generator) -> tuple[Tensor, Tensor]:
    """Digits that were drawn, and which they are."""
    return digits(rows, SIZES[size]["pixels"], draw)


loss = classified
