"""``profile``: measures a model on a sample microbatch and gives its ``LayerGraph``.

It warns of losses in which a row's term depends on other rows, since a pipeline computes them per
microbatch.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from penstock.base.arguments import public
from penstock.base.errors import InputError
from penstock.base.telling import Telling
from penstock.base.values import expect, number, whole
from penstock.core.graph import LayerGraph
from penstock.engine.device.accelerators import generators_kept
from penstock.engine.device.memory import keep_freed_pages
from penstock.engine.model import microbatches, tree
from penstock.engine.model.batches import (
    IGNORED,
    LABELS,
    BatchSplit,
    model_loss,
    parted_if_inside,
    plain,
)
from penstock.engine.model.optimizer_factory import OptimizerFactory
from penstock.engine.model.spine import (
    evaluation_mode,
    names_a_spine,
    run_spine,
    spine_of,
    uncompiled,
)
from penstock.engine.run.recipe import Loss, check_factory, check_loss
from penstock.training.profiler.alone import WARM_UP, Progress, Sample, measure_alone
from penstock.training.profiler.alone.parts import with_loss_of_head
from penstock.training.profiler.calibrating import (
    Calibrated,
    calibrate,
    num_ranks,
    uncalibrated,
)
from penstock.training.profiler.runs import Runner

_SHARES = 40
"""Steps of a progress bar while pipelines run: how many rounds there will be, nobody knows."""

_PATIENCE_PER_SECOND_ALONE = 6.0
_PATIENCE_SECONDS = (2.0, 20.0)
_MOST_REPEATS, _MOST_THREADS = 100_000, 4096


@public(
    remedies={
        "batch_size": "the rows of the inputs are those of a microbatch",
        "microbatches": "one microbatch is measured; pk.plan(graph, microbatches=…) says how many",
        "steps": "give repeats=…",
        "device": "it is measured where the model is; for hardware elsewhere, pk.estimate(…)",
    }
)
def profile(  # noqa: PLR0913 - each has a default that most callers keep
    model: nn.Module,
    inputs: Any,
    *,
    loss: Loss | None = None,
    targets: Any = None,
    optimizer: OptimizerFactory | None = None,
    repeats: int = 7,
    sizes: Sequence[int] = (),
    num_threads: int = 1,
    ranks: int | None = None,
    patience_seconds: float | None = None,
    progress: Progress | None = None,
) -> LayerGraph:
    """Measure every layer of ``model`` on one microbatch, on the device that it is on.

    All seconds are medians over rounds, after a warm-up; in each round every kind of pass has its
    turn. Layers are timed where they stand, with the graph cut between them, and say how the time
    divides; how much it is in all, passes without cuts say. What measuring takes is measured, too,
    and taken off.

    A backward is split as a stage splits it (``penstock.engine.stage.deferral``).
    ``backward_input_seconds`` (I) is what its first half takes: input gradients, and those weight
    gradients that nothing puts off. ``backward_weight_seconds`` (W) is the rest of a whole backward
    B, so that I + W = B. What both halves really take beyond B is ``split_seconds``, and what the
    forward that prepares for them takes longer ``split_forward_seconds``. ``recompute_seconds`` is
    a second forward, behind one that kept nothing.

    Of a microbatch that takes longer than 0.2 s through all layers less is run, so that a model of
    hundreds of millions of parameters takes half a minute, too: rounds end when they have taken a
    second for each of ``repeats``, but two there are in any case, in which a second forward is
    taken to be as long as the first; and ``contention`` may be that of whole backwards alone. Where
    figures are from less than was asked for, ``warnings`` say so. ``KeyboardInterrupt`` (Ctrl-C)
    ends the measurements, too: if a round is complete, the profile is what there is, and its
    warnings say that it was interrupted.

    Ranks that share a machine are slower than layers that have it for themselves. On a CPU, a
    pipeline trains a copy of the model for a few steps in each of three ways, in turns with the
    layers alone, to see by how much (``contention``); rounds go on until that is steady, and those
    in which other programs had the cores do not count. That takes memory for the copy's weights in
    versions. The model's parameters, gradients and buffers, modes, torch's
    random state and threads are afterwards as before. Whatever else forwards do (attributes, hooks,
    also of the copy), they do many times.

    Args:
        model: an ``nn.Sequential``, or a module with a ``spine`` (see ``engine.model.spine``);
            any other is captured (``penstock.engine.tracing``). It is measured in the mode it is in
            (training, unless ``eval()`` was called).
        inputs: one microbatch, rows first: a tensor or nested tensors, on the model's device.
        loss, targets: if both are given, the last layer's times and bytes include the loss. Of a
            mapping or a dataclass with the labels inside, as ``Pipeline.step`` takes it, the loss
            gets these.
        optimizer: if given, ``update_seconds`` and ``optimizer_bytes`` are measured; otherwise the
            update takes 0 s and the state of Adam is assumed.
        repeats: rounds that count, at least 1, for each size.
        sizes: other microbatch sizes to measure, each at most the rows of ``inputs``, of which the
            first ones are taken; they become ``other_sizes``.
        num_threads: intra-op threads; use what one worker will have.
        ranks: of the pipelines that are run for ``contention``. By default as many as there are
            cores, at most 8 and one per layer; with 0 or 1, none is run. None is run either on an
            accelerator, or by one of several processes of a job.
        patience_seconds: how long ``contention`` may be measured; two rounds are in any case. By
            default six times as long as the layers alone took, at least 2 s and at most 20 s. It
            ends as soon as the figures are steady.
        progress: called with (done, total), first rounds, then shares of what measuring
            ``contention`` takes. By default a line on standard error says how far it is, every few
            seconds.

    Returns:
        The profile: seconds per microbatch, bytes per microbatch. Its ``warnings`` say if the
        machine was busy, if figures are not steady, why no pipeline could be run, and if the loss
        of a row depends on other rows (which is warned of, too).

    Raises:
        ModelError: the model cannot be cut, or a layer fails on its input.
        InputError: impossible arguments, a model and inputs on several devices, or a function that
            makes no optimizer of the parameters that it is given.
    """
    _check(repeats, num_threads, ranks, sizes, progress)
    check_loss(loss)
    check_factory("optimizer", optimizer)
    _check_one_batch(inputs, has_targets=loss is None or targets is not None)
    if patience_seconds is not None:
        number("patience_seconds", patience_seconds, positive=True)
    if loss is not None and targets is None:
        inputs, targets = parted_if_inside(inputs, loss, model)
    inputs, targets = plain(inputs, "inputs"), plain(targets, "targets")
    sample = Sample(inputs, targets, loss)
    others = sample.of_sizes(sizes)
    model = traced_unless_a_chain(model, inputs)
    if loss is None and getattr(model, "gives_loss", False):
        sample = with_own_loss(model, inputs)
        others = sample.of_sizes(sizes)
    spine_of(model)  # before anything is asked of its parameters
    keep_freed_pages()
    count = num_ranks(model, sample, num_threads, ranks)
    asked = _ProfileRequest(model, sample, others, optimizer, repeats, num_threads)
    if progress is not None:
        graph = _measured(asked, count, patience_seconds, progress)
    else:
        with Telling("profiling") as telling:
            graph = _measured(asked, count, patience_seconds, telling.count)
    mixed = mixed_rows(model, sample)
    if mixed is not None:
        warnings.warn(mixed, RuntimeWarning, stacklevel=3)
        graph = replace(graph, warnings=(*graph.warnings, mixed))
    graph = with_loss_of_head(graph, model, sample)
    example = getattr(model, "example", None)
    others_too = tuple(replace(other, example=example) for other in graph.other_sizes)
    return replace(graph, example=example, other_sizes=others_too)


def _check_one_batch(inputs: Any, *, has_targets: bool) -> None:
    """Raise ``InputError`` for what gives batches, and is none."""
    # A model may take such a list; with a loss, it is a loader's batches.
    alone = isinstance(inputs, list) and len(inputs) == 1 and not has_targets
    pairs = alone and isinstance(inputs[0], tuple | list)
    if pairs or isinstance(inputs, DataLoader | Dataset):
        kind = "a list with one batch" if pairs else f"a {type(inputs).__name__}"
        raise InputError(
            f"inputs are {kind}; give the batch itself, as in "
            "profile(model, inputs, loss=cross_entropy, targets=targets)"
        )


class _ProfileRequest(NamedTuple):
    """The arguments of ``profile``, checked."""

    model: nn.Module
    sample: Sample
    others: Sequence[Sample]
    optimizer: OptimizerFactory | None
    repeats: int
    num_threads: int


def _measured(
    asked: _ProfileRequest, count: int, patience_seconds: float | None, report: Progress
) -> LayerGraph:
    """The layers alone, and ``count`` ranks together."""
    model, sample, others, optimizer, repeats, num_threads = asked
    rounds = (WARM_UP + repeats) * (1 + len(others))
    total = rounds + (_SHARES if count else 0)
    runner = _runner(model, sample, optimizer) if count else None
    begun = time.perf_counter()
    graph, interrupted = measure_alone(
        model,
        sample,
        others,
        optimizer=optimizer,
        repeats=repeats,
        num_threads=num_threads,
        progress=lambda done, _: report(done, total),
    )
    if runner is None:
        return graph
    patience = patience_seconds or _patience_seconds(time.perf_counter() - begun)
    if interrupted:
        calibrated = uncalibrated(graph, KeyboardInterrupt("interrupted"))
    elif isinstance(runner, Runner):
        calibrated = calibrate(
            runner,
            graph,
            count,
            patience,
            lambda share: report(min(rounds + int(share * _SHARES), total - 1), total),
        )
    else:
        calibrated = uncalibrated(graph, runner)
    report(total, total)
    return _with_contention(calibrated)


def _patience_seconds(alone_seconds: float) -> float:
    """How long pipelines are measured by default."""
    least, most = _PATIENCE_SECONDS
    return min(max(_PATIENCE_PER_SECOND_ALONE * alone_seconds, least), most)


def _runner(
    model: nn.Module, sample: Sample, optimizer: OptimizerFactory | None
) -> Runner | Exception:
    """A runner, which trains a copy of the model; or the reason why no copy can be made.

    The copy is made before anything is measured: that may leave something on the model that cannot
    be copied.
    """
    try:
        return Runner(model, sample, optimizer)
    except Exception as error:  # a model may refuse to be copied in any way
        return error


def _with_contention(calibrated: Calibrated) -> LayerGraph:
    graph, contention, doubts = calibrated
    doubts = graph.warnings + doubts
    return replace(
        graph,
        contention=contention,
        warnings=doubts,
        other_sizes=tuple(
            replace(other, contention=contention, warnings=doubts) for other in graph.other_sizes
        ),
    )


def _check(
    repeats: int,
    num_threads: int,
    ranks: int | None,
    sizes: Sequence[int],
    progress: Progress | None,
) -> None:
    whole("repeats", repeats, 1, _MOST_REPEATS)
    whole("num_threads", num_threads, 1, _MOST_THREADS)
    if ranks is not None:
        whole("ranks", ranks, 0)
    expect(progress, Callable | None, "progress", "give a function of (done, total)")
    expect(sizes, Iterable, "sizes", "give a list of numbers of rows")


def with_own_loss(model: nn.Module, inputs: Any) -> Sample:
    """A sample for a model that computes its loss itself, from labels among its inputs."""
    parting = BatchSplit.by(LABELS, model_loss, model)
    return Sample(*parting.parted(inputs, "the sample"), model_loss)


def traced_unless_a_chain(model: nn.Module, inputs: Any) -> nn.Module:
    """The model itself if it names its spine; otherwise captured, for ``Pipeline`` too."""
    model = uncompiled(model)
    if not isinstance(model, nn.Module) or names_a_spine(model):
        return model
    # Tracing takes seconds to import, and few models need it.
    from penstock.engine.tracing.entrance import traced_for_profile

    return traced_for_profile(model, inputs)


_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_LOW_PRECISION = 3e-2


def mixed_rows(model: nn.Module, sample: Sample) -> str | None:
    """A warning if the loss of a sample is neither the mean nor the sum of those of its halves.

    Args:
        model: it is run in evaluation mode, in which rows do not meet in batch norm.
        sample: with fewer than two rows, without a loss, or where the model does not take half of
            the rows, nothing can be said.
    """
    if sample.loss is None or sample.num_rows < 2:
        return None
    inputs, targets = (microbatches.split(part, 2) for part in (sample.inputs, sample.targets))
    try:
        with (
            evaluation_mode(model),
            torch.no_grad(),
            generators_kept(tensor.device for tensor in tree.tensors(sample.inputs)),
        ):
            layers = [layer.module for layer in spine_of(model)]
            whole = _loss(layers, sample, sample.inputs, sample.targets)
            halves = [_loss(layers, sample, *half) for half in zip(inputs, targets, strict=True)]
    except Exception:  # a model may refuse so few rows in any way, and nobody has asked for them
        return None
    tolerance = _TOLERANCE.get(whole.dtype, _LOW_PRECISION)
    whole, both = whole.double().cpu(), torch.stack(halves).double().cpu()
    for weights in _weights(inputs, targets):
        # Where a half has no labels, its mean over them is no number, and counts for nothing.
        expected = torch.where(weights > 0, both * weights, 0.0).sum()
        if torch.allclose(whole, expected, rtol=tolerance, atol=tolerance):
            return None
    return (
        f"the loss of the sample is {float(whole):.4g}, but those of its halves are "
        f"{float(both[0]):.4g} and {float(both[1]):.4g}, and it is neither their mean nor their "
        "sum: the term of a row depends on other rows, as in a contrastive loss with negatives of "
        "the batch. A pipeline computes the loss of each microbatch for itself, so it trains "
        "something else. Take larger microbatches, as many rows as the loss should see, or a loss "
        "of single rows; where rows only count differently, give Pipeline(…, weight=…)"
    )


def _loss(layers: Sequence[nn.Module], sample: Sample, inputs: Any, targets: Any) -> Tensor:
    assert sample.loss is not None
    # Layers may work in place on what they are given.
    own = tree.replace(Tensor, Tensor.clone, inputs)
    return sample.loss(run_spine(layers, own), targets)


def _weights(inputs: list[Any], targets: list[Any]) -> Iterator[Tensor]:
    """Factors on the losses of two halves: of a mean over rows, a sum, and a mean over labels."""
    rows = [microbatches.num_rows(half, "inputs") for half in inputs]
    yield torch.tensor(rows).double() / sum(rows)
    yield torch.ones(2).double()
    for first in (0, 1):  # a causal language model has no label for the first word
        counts = [_num_labels(half, first) for half in targets]
        if sum(counts):
            yield torch.tensor(counts).double() / sum(counts)


def _num_labels(targets: Any, first: int) -> int:
    """Labels that a loss does not leave out, in sequences from the position ``first`` on."""
    labels = (tensor for tensor in tree.tensors(targets) if not tensor.is_floating_point())
    sequences = (tensor[:, first:] if tensor.dim() > 1 else tensor for tensor in labels)
    return sum(int((tensor != IGNORED).sum()) for tensor in sequences)
