"""Write ``docs/model-zoo.md`` and ``docs/images/zoo``: the models of ``examples/models``, planned
for four devices, and trained for some steps in a pipeline and on one device.

It measures, so no two runs give the same page. Run it with ``PYTHONPATH=. python
tools/gallery/zoo.py``; ``--width 8`` trains wider models, ``--steps 100`` longer, ``--only vgg``
shows what one of them gives without writing anything.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from pages import DOCS, filled, table
from torch import nn

import penstock as pk
from penstock.drawing import draw_plan
from penstock.planning.plans import Plan
from penstock.planning.plans.picture import picture_of
from penstock.trial.reference.single_device import SingleDevice

NAMES = (
    *("alexnet", "vgg", "resnet", "inception", "amoebanet", "detector"),
    *("gnmt", "awd_lstm", "gpt2", "bert", "s2vt", "speech"),
)
DEVICES, MICROBATCHES, ROWS = 4, 4, 16


@dataclass(frozen=True)
class Trained:
    """What a model gave.

    Attributes:
        module: of ``examples/models``.
        published: parameters of the published model.
        parameters: of the one that was trained.
        plan: it was trained with.
        ours, theirs: losses of each step, in the pipeline and on one device.
    """

    module: ModuleType
    published: int
    parameters: int
    plan: Plan
    ours: list[float]
    theirs: list[float]

    @property
    def difference(self) -> float:
        """By how much losses differ at most."""
        return max(abs(a - b) for a, b in zip(self.ours, self.theirs, strict=True))

    @property
    def title(self) -> str:
        """What the model is called."""
        return re.split("[:,.]", inspect.getdoc(self.module) or "")[0]


def trained(name: str, width: float, steps: int) -> Trained:
    """Plan a small model for four devices, and train it both ways."""
    module = importlib.import_module(f"examples.models.{name}")
    with torch.device("meta"):
        published = _count(module.build())
    torch.manual_seed(0)
    model = module.build("small", width)
    batches = [*_batches(module, steps)]
    inputs = batches[0][0]
    if not isinstance(model, nn.Sequential):
        model = pk.capture(model, inputs)
    sample = module.batch(ROWS // MICROBATCHES, "small", torch.Generator().manual_seed(1))
    graph = pk.profile(model, sample[0], loss=module.loss, targets=sample[1], repeats=2, ranks=0)
    plan = pk.plan(graph, _cluster(), microbatches=MICROBATCHES, stages=DEVICES, schedule="1f1b")
    options: dict[str, Any] = {"seed": 3, "weight": getattr(module, "hidden", None)}
    optimizer = partial(torch.optim.AdamW, lr=0.003)
    alone = SingleDevice(copy.deepcopy(model), MICROBATCHES, module.loss, optimizer, **options)
    theirs = [float(alone.step(*batch)) for batch in batches]
    parameters = _count(model)
    with pk.Pipeline(model, plan, loss=module.loss, optimizer=optimizer, **options) as pipeline:
        ours = [float(pipeline.step(*batch)) for batch in batches]
    return Trained(module, published, parameters, plan, ours, theirs)


def _cluster() -> pk.Cluster:
    devices = tuple(pk.Device(name=f"device {number}") for number in range(DEVICES))
    return pk.Cluster(devices=devices, link=pk.Link(latency_seconds=1e-5, bytes_per_second=10e9))


def _batches(module: ModuleType, steps: int) -> Iterator[tuple[Any, Any]]:
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        yield module.batch(ROWS, "small", draw)


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def write(results: Sequence[Trained], width: float, docs: Path = DOCS) -> None:
    """Write the page, and a picture per model."""
    folder = docs / "images" / "zoo"
    folder.mkdir(parents=True, exist_ok=True)
    for result in results:
        name = _name(result)
        draw_plan(picture_of(result.plan), result.plan.simulate(), folder / f"{name}.svg")
    page = filled(
        "model-zoo.md",
        table=_table(results),
        stories="\n".join(map(_story, results)),
        width=f"{width:g}",
        steps=str(len(results[0].ours)),
    )
    (docs / "model-zoo.md").write_text(page, encoding="utf-8")


def _name(result: Trained) -> str:
    return result.module.__name__.rpartition(".")[2]


def _table(results: Sequence[Trained]) -> str:
    columns = (
        *("model", "published", "here", "layers", "predicted bubble"),
        *("first loss", "last loss, pipeline", "one device", "largest difference"),
    )
    return table(columns, map(_row, results))


def _row(result: Trained) -> tuple[str, ...]:
    return (
        f"[{result.title}](#{_name(result).replace('_', '-')})",
        f"{result.published / 1e6:.1f} M",
        f"{result.parameters / 1e3:.0f} k",
        str(sum(len(stage.layers) for stage in result.plan.stages)),
        f"{100 * result.plan.simulate().bubble:.0f} %",
        f"{_mean(result.ours[:5]):.3f}",
        f"{_mean(result.ours[-5:]):.3f}",
        f"{_mean(result.theirs[-5:]):.3f}",
        f"{result.difference:.0e}" if result.difference else "0",
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _story(result: Trained) -> str:
    name = _name(result)
    text = (inspect.getdoc(result.module) or "").split("\n", 1)[1].strip().replace("``", "`")
    text = re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)
    cuts = ", ".join(f"`{stage.layers[0]}`" for stage in result.plan.stages[1:])
    return f"""## {name.replace("_", "-")}

**{result.title}.** {text}

Stages begin at {cuts}.

![The plan of {result.title}: four devices and the stage of each](images/zoo/{name}.svg)
"""


def main(arguments: Sequence[str]) -> None:
    """Train all models, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=float, default=2, help="a factor for the small models'")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", choices=NAMES)
    chosen = parser.parse_args(arguments)
    results = []
    for name in [chosen.only] if chosen.only else NAMES:
        results.append(trained(name, chosen.width, chosen.steps))
        print(" ".join(_row(results[-1])), file=sys.stderr, flush=True)  # noqa: T201 - the script's
        if not chosen.only:  # a page of those so far, since all of them take minutes
            write(results, chosen.width)


if __name__ == "__main__":
    main(sys.argv[1:])
