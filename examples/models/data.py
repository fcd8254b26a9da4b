"""Small data for the models of this folder: nothing is downloaded, and a seed gives it again.

Digits and videos are drawn, sounds are made by formula, sentences by a rule whose answer can be
checked, and text is the source code of Python's own standard library. Every function takes the
number of rows and a generator, and returns tensors with rows first.
"""

from __future__ import annotations

import math
from functools import cache

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from penstock.demo.corpus import Corpus

_GLYPHS = (
    ".###. #...# #..## #.#.# ##..# #...# .###.",
    "..#.. .##.. ..#.. ..#.. ..#.. ..#.. .###.",
    ".###. #...# ....# ...#. ..#.. .#... #####",
    "##### ...#. ..#.. ...#. ....# #...# .###.",
    "...#. ..##. .#.#. #..#. ##### ...#. ...#.",
    "##### #.... ####. ....# ....# #...# .###.",
    "..##. .#... #.... ####. #...# #...# .###.",
    "##### ....# ...#. ..#.. .#... .#... .#...",
    ".###. #...# #...# .###. #...# #...# .###.",
    ".###. #...# #...# .#### ....# ...#. .##..",
)
"""The ten digits, five dots wide and seven high."""
COLOURS = torch.tensor([[1.0, 0.2, 0.2], [0.2, 1.0, 0.2], [0.3, 0.3, 1.0]])
DIRECTIONS = ((0, 1), (1, 0), (0, -1), (-1, 0))
_START, _END, _FIRST_COLOUR, _FIRST_DIRECTION = 0, 1, 2, 5
CAPTION_WORDS = 9
"""Start, end, three colours, four directions."""


def digits(rows: int, pixels: int, draw: Generator) -> tuple[Tensor, Tensor]:
    """Digits in a random colour at a random place, in noise.

    Returns:
        Images ``float[rows, 3, pixels, pixels]`` around zero, and which digits they show,
        ``int64[rows]``.
    """
    glyphs = torch.tensor([[[dot == "#" for dot in line] for line in g.split()] for g in _GLYPHS])
    scale = max(1, pixels * 5 // 8 // 7)
    drawn = glyphs.float().repeat_interleave(scale, 1).repeat_interleave(scale, 2)
    height, width = drawn.shape[1:]
    labels = torch.randint(0, 10, (rows,), generator=draw)
    colours = 0.5 + 0.5 * torch.rand(rows, 3, 1, 1, generator=draw)
    images = 0.3 * torch.randn(rows, 3, pixels, pixels, generator=draw)
    for row in range(rows):
        top = int(torch.randint(0, pixels - height + 1, (), generator=draw))
        left = int(torch.randint(0, pixels - width + 1, (), generator=draw))
        shown = drawn[labels[row]] * colours[row]
        images[row, :, top : top + height, left : left + width] += 2 * shown
    return images, labels


def boxes(rows: int, pixels: int, cells: int, draw: Generator) -> tuple[Tensor, Tensor]:
    """Images with one bright rectangle each, and where it is.

    Returns:
        Images ``float[rows, 3, pixels, pixels]``, and targets ``float[rows, cells, cells, 6]``: of
        the cell that holds the rectangle's centre, 1, its centre within the cell, its height and
        width as parts of the image, and the number of its colour; 0 elsewhere.
    """
    images = 0.2 * torch.randn(rows, 3, pixels, pixels, generator=draw)
    targets = torch.zeros(rows, cells, cells, 6)
    for row in range(rows):
        height, width = (
            int(torch.randint(pixels // 6, pixels // 2, (), generator=draw)) for _ in range(2)
        )
        top = int(torch.randint(0, pixels - height + 1, (), generator=draw))
        left = int(torch.randint(0, pixels - width + 1, (), generator=draw))
        colour = int(torch.randint(0, len(COLOURS), (), generator=draw))
        images[row, :, top : top + height, left : left + width] += COLOURS[colour][:, None, None]
        down, right = (
            (start + size / 2) * cells / pixels for start, size in ((top, height), (left, width))
        )
        seen = [1.0, down % 1, right % 1, height / pixels, width / pixels, colour]
        targets[row, int(down), int(right)] = torch.tensor(seen)
    return images, targets


def videos(rows: int, frames: int, pixels: int, draw: Generator) -> tuple[Tensor, Tensor]:
    """Videos of a coloured square that moves, and what they show in words.

    Returns:
        Videos ``float[rows, frames, 3, pixels, pixels]``, and captions ``int64[rows, 3]``: the
        colour, the direction, and the end.
    """
    colours = torch.randint(0, len(COLOURS), (rows,), generator=draw)
    ways = torch.randint(0, len(DIRECTIONS), (rows,), generator=draw)
    shown = 0.1 * torch.randn(rows, frames, 3, pixels, pixels, generator=draw)
    side = max(1, pixels // 4)
    for row in range(rows):
        down, right = DIRECTIONS[ways[row]]
        top, left = torch.randint(0, pixels, (2,), generator=draw).tolist()
        for frame in range(frames):
            # What leaves the picture comes in again on the other side.
            lines = (torch.arange(side) + top + frame * down * side // 2) % pixels
            columns = (torch.arange(side) + left + frame * right * side // 2) % pixels
            shown[row, frame][:, lines[:, None], columns] += COLOURS[colours[row]][:, None, None]
    end = torch.full((rows,), _END)
    return shown, torch.stack([colours + _FIRST_COLOUR, ways + _FIRST_DIRECTION, end], 1)


def captions_so_far(captions: Tensor) -> Tensor:
    """The words before each word of captions, ``int64`` of the same shape, from a start on."""
    return F.pad(captions[:, :-1], (1, 0), value=_START)


def translations(
    rows: int, length: int, vocabulary: int, draw: Generator
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Sentences in a made language, and what they mean in another (``translated``).

    Returns:
        Inputs (source, translation so far), and the translation; each ``int64[rows, length]``.
    """
    source = torch.randint(1, vocabulary, (rows, length), generator=draw)
    target = translated(source, vocabulary)
    return (source, F.pad(target[:, :-1], (1, 0))), target


def translated(source: Tensor, vocabulary: int) -> Tensor:
    """The other language has the words in reverse order, and each one's word three further on;
    word 0 begins a sentence and stands in none."""
    return (source.flip(1) - 1 + 3) % (vocabulary - 1) + 1


@cache
def _text() -> Tensor:
    return Corpus.standard_library().training


def text(rows: int, length: int, vocabulary: int, draw: Generator) -> tuple[Tensor, Tensor]:
    """Pieces of the standard library's source code, byte by byte, and the byte after each.

    A vocabulary of fewer than 256 takes some bytes for the same.

    Returns:
        Tokens and next tokens, each ``int64[rows, length]``.
    """
    source = _text()
    starts = torch.randint(0, len(source) - length - 1, (rows, 1), generator=draw)
    pieces = source[starts + torch.arange(length + 1)].long() % vocabulary
    return pieces[:, :-1], pieces[:, 1:]


def masked_text(rows: int, length: int, vocabulary: int, draw: Generator) -> tuple[Tensor, Tensor]:
    """The same text with every seventh byte or so hidden.

    Returns:
        Tokens, the last of the vocabulary for what is hidden, and what is hidden there, -100
        elsewhere; each ``int64[rows, length]``. The first byte of every row is hidden.
    """
    tokens, _ = text(rows, length, vocabulary - 1, draw)
    hidden = torch.rand(rows, length, generator=draw) < 0.15
    hidden[:, 0] = True
    return tokens.masked_fill(hidden, vocabulary - 1), tokens.masked_fill(~hidden, -100)


def sounds(
    rows: int, tones: int, frames: int, bands: int, draw: Generator
) -> tuple[Tensor, Tensor]:
    """Melodies of tones with overtones, in noise, as what a filter bank hears of them.

    Returns:
        Energies ``float[rows, 1, bands, frames]`` around zero, and the tones,
        ``int64[rows, tones]``, each from 1 to 6: 0 is for no tone.
    """
    played = torch.randint(1, 7, (rows, tones), generator=draw)
    samples = 64  # of a frame
    times = torch.arange(frames * samples) / samples
    which = (times * tones / frames).long().clamp(max=tones - 1)
    pitch = 3.0 * 1.25 ** played[:, which].float()  # in oscillations per frame
    phase = 2 * math.pi * pitch.cumsum(1) / samples
    # A tone swells and fades, so that the same one twice is heard as two.
    swell = (math.pi * (times * tones / frames % 1)).sin()
    wave = swell * (phase.sin() + 0.5 * (2 * phase).sin() + 0.25 * (3 * phase).sin())
    wave = wave + 0.05 * torch.randn(wave.shape, generator=draw)
    spectrum = torch.fft.rfft(wave.view(rows, frames, samples)).abs()[..., 1 : bands + 1]
    return (spectrum + 0.1).log().transpose(1, 2).unsqueeze(1), played
