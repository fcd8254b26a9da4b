"""S2VT: a video in, a sentence out.

Venugopalan et al., arXiv:1505.00487, 2015, section 3 and figure 2: two LSTMs, the lower one for
frames, the upper one for words, with zeros where there is nothing to read. Frames are features of
convolutions that are trained along.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from examples.models.data import CAPTION_WORDS, captions_so_far, videos
from examples.models.sizes import chosen, classified

SIZES = {
    "paper": {
        "channels": (96, 256, 384),
        "features": 4096,
        "embedding": 500,
        "hidden": 1000,
        "vocabulary": 46167,
        "frames": 80,
        "words": 20,
        "pixels": 64,
    },
    "small": {
        "channels": (4, 8, 8),
        "features": 16,
        "embedding": 8,
        "hidden": 12,
        "vocabulary": CAPTION_WORDS,
        "frames": 4,
        "words": 3,
        "pixels": 16,
    },
}


class FrameFeatures(nn.Module):
    """Convolutions that look at every frame by itself."""

    def __init__(self, channels: tuple[int, ...], features: int, pixels: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for outputs in channels:
            layers += [nn.Conv2d(inputs, outputs, 3, 2, 1), nn.ReLU(inplace=True)]
            inputs = outputs
        side = pixels // 2 ** len(channels)
        self.convolutions = nn.Sequential(*layers)
        self.features = nn.Linear(inputs * side**2, features)

    def forward(self, video: Tensor) -> Tensor:
        """[rows, frames, 3, pixels, pixels] → [rows, frames, features]."""
        seen = self.convolutions(video.flatten(0, 1)).flatten(1)
        return self.features(seen).relu().unflatten(0, video.shape[:2])


class S2VT(nn.Module):
    """From (video, words so far) to the logits of the next word."""

    def __init__(self, sizes: dict[str, int], frames: nn.Module) -> None:
        super().__init__()
        embedding, hidden = sizes["embedding"], sizes["hidden"]
        self.frames = frames
        self.seen = nn.Linear(sizes["features"], embedding)
        self.watching = nn.LSTM(embedding, hidden, batch_first=True)
        self.words = nn.Embedding(sizes["vocabulary"], embedding)
        self.telling = nn.LSTM(hidden + embedding, hidden, batch_first=True)
        self.dropout = nn.Dropout(0.2)
        self.next_word = nn.Linear(hidden, sizes["vocabulary"])

    def forward(self, video: Tensor, words: Tensor) -> Tensor:
        """[rows, frames, 3, pixels, pixels] and [rows, words] → [rows, words, vocabulary]."""
        shown, said = video.shape[1], words.shape[1]
        seen = self.dropout(self.seen(self.frames(video)))
        watched, _ = self.watching(F.pad(seen, (0, 0, 0, said)))
        heard = F.pad(self.dropout(self.words(words)), (0, 0, shown, 0))
        told, _ = self.telling(torch.cat([watched, heard], 2))
        return self.next_word(self.dropout(told[:, shown:]))


def build(size: str = "paper", width: float = 1) -> S2VT:
    """The network of the paper, or a small one.

    Args:
        size: ``"paper"`` or ``"small"``.
        width: a factor for the widths of all layers.
    """
    sizes = chosen(SIZES, size, width)
    frames = FrameFeatures(sizes["channels"], sizes["features"], sizes["pixels"])
    return S2VT(sizes, frames)


def batch(rows: int, size: str, draw: Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Squares that move with the words so far, and the words."""
    video, captions = videos(rows, SIZES[size]["frames"], SIZES[size]["pixels"], draw)
    return (video, captions_so_far(captions)), captions


loss = classified
