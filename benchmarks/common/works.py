"""Pieces of work that every contestant of a benchmark does: a model, a loss, an optimizer, data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from penstock.demo import GPT, Corpus, loss

Loss = Callable[[Tensor, Tensor], Tensor]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Work:
    """The same training step for everybody.

    Attributes:
        name: for people.
        build_model: gives the same weights every time; the model has a ``spine()`` or is an
            ``nn.Sequential``.
        quarters: where the spine is cut in 4, as the numbers of layers before each cut.
        loss: the mean over one microbatch.
        num_microbatches: divides the rows of the minibatch.
        build_optimizer: for the parameters that a rank holds.
        inputs, targets: one minibatch; every later one has these shapes.
    """

    name: str
    build_model: Callable[[], nn.Module]
    quarters: tuple[int, int, int]
    loss: Loss
    num_microbatches: int
    build_optimizer: OptimizerFactory
    inputs: Tensor
    targets: Tensor

    @property
    def cut(self) -> int:
        """How many layers are before the cut in the middle."""
        return self.quarters[1]

    def layers(self) -> list[nn.Module]:
        """The spine of a newly built model."""
        model = self.build_model()
        return list(model) if isinstance(model, nn.Sequential) else model.spine()

    def stages(self, num_stages: int) -> list[range]:
        """Which layers each of 2 or 4 stages has."""
        cuts = self.quarters if num_stages == 4 else (self.cut,)
        bounds = (0, *cuts, len(self.layers()))
        return [range(*pair) for pair in itertools.pairwise(bounds)]


def gpt_work(num_microbatches: int = 8, rows: int = 2, name: str = "GPT") -> Work:
    """The demonstration GPT on the standard library's source: 12 ms forward per half."""

    def build() -> GPT:
        torch.manual_seed(0)
        return GPT()

    inputs, targets = next(Corpus.standard_library().batches(num_microbatches * rows, 48))
    # Its fused form takes a third of the time of the plain one on a CPU.
    optimizer = partial(torch.optim.AdamW, fused=True)
    return Work(name, build, (3, 5, 7), loss, num_microbatches, optimizer, inputs, targets)


def tiny_work(num_microbatches: int = 8, rows: int = 24, width: int = 256) -> Work:
    """A small perceptron, a fifth of a millisecond per half: what is left is overhead."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        pairs = ((nn.Linear(width, width), nn.ReLU()) for _ in range(8))
        return nn.Sequential(*itertools.chain.from_iterable(pairs))

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(num_microbatches * rows, width, generator=generator)
    targets = torch.randn(num_microbatches * rows, width, generator=generator)
    mean_square = nn.functional.mse_loss
    return Work(
        "tiny", build, (4, 8, 12), mean_square, num_microbatches, torch.optim.SGD, inputs, targets
    )


WORKS: dict[str, Callable[[int], Work]] = {
    "gpt20": partial(gpt_work, rows=4, name="GPT 20 ms"),
    "gpt12": partial(gpt_work, rows=2, name="GPT 12 ms"),
    "gpt7": partial(gpt_work, rows=1, name="GPT 7 ms"),
    "tiny": tiny_work,
}
"""By the name on the command line: forward of half the model and one microbatch takes 20, 12, 7
and 0.2 ms on one core of an AMD EPYC."""
