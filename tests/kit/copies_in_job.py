"""What jobs share whose ranks are copies of stages that have parts of the weights each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from penstock.base.errors import PenstockError
from penstock.engine.model.randomness import LayerStreams
from penstock.engine.model.spine import spine_of
from penstock.engine.stage.protocol import Keep
from penstock.engine.stage.stage import Stage
from penstock.planning.plans import Plan
from penstock.training.pipeline import Pipeline
from tests.kit.helpers import make_batch
from tests.kit.one_device import OneDevice
from tests.kit.sharing import spread
from tests.kit.training import adamw, pipeline_of_job

DOUBLE = torch.float64


class AllRanks:
    """All ranks of a job as copies of a stage, without an engine."""

    def __init__(self) -> None:
        self.group = dist.group.WORLD
        self.size, self.index = dist.get_world_size(), dist.get_rank()

    def exchange(self, output, own, output_sizes=None, own_sizes=None):
        dist.all_to_all_single(output, own, output_sizes, own_sizes)

    def gather(self, output, own):
        return dist.all_gather_into_tensor(output, own, async_op=True)

    def begin_exchange(self, *given):
        return dist.all_to_all_single(*given, async_op=True).wait

    def sum_between(self, shard):
        yield from ()
        return shard

    def largest(self, numbers):
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX)

    def add(self, numbers):
        dist.all_reduce(numbers)

    def take_first(self, values):
        dist.broadcast(values, 0)

    def abandon(self):
        pass

    def close(self, *, failed):
        pass


def backward_in_halves(
    model: nn.Module,
    alone: nn.Module,
    divide: Callable[[Stage], None],
    finish: Callable[[Stage], None] = lambda stage: None,
) -> Stage:
    """A stage alone after backwards in two halves, with several microbatches under way; ``alone``
    has the gradients of all copies' microbatches.

    Args:
        divide: gives each rank its part of the stage.
        finish: is called behind the last backward.
    """
    stage = Stage(0, spine_of(model), 0, LayerStreams(0))
    divide(stage)
    size = dist.get_world_size()
    inputs, targets = make_batch(8 * size, DOUBLE)
    parts = list(zip(inputs.chunk(2 * size), targets.chunk(2 * size), strict=True))
    for number in range(2):
        value, wanted = parts[2 * dist.get_rank() + number]
        criterion = partial(F.cross_entropy, target=wanted, reduction="sum")
        stage.forward(number, value, criterion=criterion, keep=Keep.SPLIT)
    for number in range(2):
        stage.backward_input(number, [torch.ones((), dtype=DOUBLE)])
    stage.backward_weight(0, 1)
    finish(stage)
    F.cross_entropy(alone(inputs), targets, reduction="sum").backward()
    return stage


def far_from_one_device(
    plan: Plan,
    make: Callable[[], nn.Module],
    num_steps: int,
    options: Mapping[str, object],
    num_evaluated: int = 24,
) -> float:
    """How far losses, outputs and weights are from those of one device, at most; the gradients of
    two minibatches make one update.

    Args:
        options: of the training; of what can be called, the results.
        num_evaluated: rows of each minibatch that are evaluated.
    """
    batches = [make_batch(24, DOUBLE, step) for step in range(num_steps)]

    def made() -> dict[str, object]:
        return {key: own() if callable(own) else own for key, own in options.items()}

    def alone():
        model = make()
        device = OneDevice(model, plan.num_microbatches, optimizer=adamw, **made())
        losses, outputs = [], []
        for step, batch in enumerate(batches):
            losses.append(device.step(*batch, update=step != 1).detach())
            with torch.no_grad():
                parts = device.cut(batch[0][:num_evaluated])
                outputs.append(torch.cat([model(part) for part in parts]))
        return losses, outputs, model.state_dict()

    ((losses, outputs, wanted),) = spread([alone])
    model, far = make(), 0.0
    if dist.get_rank():
        nn.init.zeros_(next(model.parameters()))  # the first copy's values count
    with pipeline_of_job(plan, model, **made()) as pipeline:
        for step, (batch, loss, there) in enumerate(zip(batches, losses, outputs, strict=True)):
            far = max(far, abs(pipeline.step(*batch, update=step != 1) - loss).item())
            evaluated = pipeline.evaluate(batch[0][:num_evaluated])
            far = max(far, (evaluated - there).abs().max().item())
        state = pipeline.gather_state_dict()
    if state.keys() != wanted.keys():
        return float("inf")
    return max([far, *((state[key] - own).abs().max().item() for key, own in wanted.items())])


def going_on(
    plan: Plan, model: nn.Module, folder: Path, first: int, dtype=DOUBLE, **options
) -> dict[str, torch.Tensor]:
    """The weights after two steps of a run that goes on from a folder and saves there."""
    with pipeline_of_job(plan, model, **options) as pipeline:
        assert first == (pipeline.load(folder) or 0)
        for step in range(first, first + 2):
            pipeline.step(*make_batch(24, dtype, step))
        pipeline.save(folder)
        return pipeline.gather_state_dict()


def not_refused(
    plan: Plan,
    model: nn.Module,
    words: str,
    ask: Callable[[Pipeline], object] = lambda pipeline: None,
    **options,
) -> Iterator[str]:
    """A sentence if a pipeline can be built and asked, or says something else than some words."""
    try:
        with pipeline_of_job(plan, model, **options) as pipeline:
            ask(pipeline)
        yield f"nobody says: {words}"
    except PenstockError as error:
        if words not in str(error):
            yield f"{words}: {error}"
