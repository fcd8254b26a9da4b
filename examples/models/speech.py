"""Speech: energies of sound in, letters out, and nobody said when each of them is spoken.

Deep Speech 2 (Amodei et al., arXiv:1512.02595, 2015, sections 3.1 to 3.5) in small: convolutions
over time and frequency (3 in the paper), bidirectional recurrent layers (7), and connectionist
temporal classification (Graves et al., ICML 2006) for a loss.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from examples.models.data import sounds
from examples.models.sizes import chosen

SIZES = {
    "paper": {
        "channels": (32, 32, 96),
        "hidden": 880,
        "layers": 7,
        "letters": 29,
        "tones": 40,
        "frames": 400,
        "bands": 160,
    },
    "small": {
        "channels": (4, 4),
        "hidden": 8,
        "layers": 2,
        "letters": 7,
        "tones": 3,
        "frames": 32,
        "bands": 16,
    },
}


class Speech(nn.Module):
    """Convolutions, recurrent layers, and the letters of every second frame."""

    def __init__(self, sizes: dict[str, int], channels: tuple[int, ...]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs, bands, hidden = 1, sizes["bands"], sizes["hidden"]
        for place, outputs in enumerate(channels):
            convolution = nn.Conv2d(inputs, outputs, (5, 5), (2, 2 if place == 0 else 1), (2, 2))
            layers += [convolution, nn.BatchNorm2d(outputs), nn.Hardtanh(0, 20, inplace=True)]
            inputs, bands = outputs, (bands + 1) // 2
        self.convolutions = nn.Sequential(*layers)
        widths = [inputs * bands] + [2 * hidden] * (sizes["layers"] - 1)
        self.layers = nn.ModuleList(
            nn.GRU(inputs, hidden, batch_first=True, bidirectional=True) for inputs in widths
        )
        self.letters = nn.Linear(2 * hidden, sizes["letters"])

    def forward(self, sound: Tensor) -> Tensor:
        """[rows, 1, bands, frames] → logits [rows, frames / 2, letters]; letter 0 is a blank."""
        value = self.convolutions(sound).flatten(1, 2).transpose(1, 2)
        for layer in self.layers:
            value, _ = layer(value)
        return self.letters(value)


def build(size: str = "paper", width: float = 1) -> Speech:
    """The network.

    Args:
        size: ``"paper"`` or ``"small"``.
        width: a factor for the widths of all layers.
    """
    sizes = chosen(SIZES, size, width)
    return Speech(sizes, sizes["channels"])


def batch(rows: int, size: str, draw: Generator) -> tuple[Tensor, Tensor]:
    """Melodies, and their tones."""
    sizes = SIZES[size]
    return sounds(rows, sizes["tones"], sizes["frames"], sizes["bands"], draw)


def loss(output: Tensor, targets: Tensor) -> Tensor:
    """How unlikely it is that what was heard is what was said, a mean over rows."""
    rows, frames, _ = output.shape
    return F.ctc_loss(
        output.log_softmax(2).transpose(0, 1),
        targets,
        torch.full((rows,), frames),
        torch.full((rows,), targets.shape[1]),
    )
