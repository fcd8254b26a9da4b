"""Schedules performed by hand on real stages: what the meter counts is what was predicted."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from penstock.base.errors import InputError
from penstock.core.schedule import Kind, families
from penstock.core.schedule.memory import Sizes, units
from penstock.core.timing.simulator import simulate
from penstock.demo.gpt import GPT, loss
from penstock.engine.device.activation_meter import ActivationMeter
from penstock.engine.model import tree
from penstock.engine.model.randomness import LayerStreams
from penstock.engine.model.spine import spine_of
from penstock.engine.stage.stage import Keep, Stage
from penstock.training.profiler import profile
from tests.kit.alive import Alive
from tests.kit.helpers import make_batch, make_mlp
from tests.oracles.op_by_op import executable_order


@dataclass(frozen=True)
class Work:
    """A model, its loss, and (inputs, targets) of any microbatch."""

    build_model: Callable[[], nn.Module]
    loss: Callable[..., torch.Tensor]
    batch: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    num_layers: int

    def cuts(self, num_stages):
        """(start, stop) of every stage."""
        borders = [round(k * self.num_layers / num_stages) for k in range(num_stages + 1)]
        return list(itertools.pairwise(borders))

    def stages(self, num_stages):
        layers = spine_of(self.build_model())
        return [
            Stage(index, layers[start:stop], start, LayerStreams(0))
            for index, (start, stop) in enumerate(self.cuts(num_stages))
        ]


def tokens(microbatch):
    generator = torch.Generator().manual_seed(microbatch)
    inputs, targets = torch.randint(0, 16, (2, 2, 8), generator=generator)
    return inputs, targets


SMALL_GPT = Work(
    partial(GPT, vocabulary=16, width=16, heads=2, layers=8, context=8), loss, tokens, 10
)
MLP = Work(make_mlp, F.cross_entropy, lambda k: make_batch(rows=8, seed=k), 6)


def copied(value):
    """What arrives of a value in another process."""
    return tree.replace(torch.Tensor, lambda leaf: tree.apart(leaf.clone()), value)


class Rank:
    """Stages with a meter, and an independent count of what is alive.

    Messages are copied, as between processes: nothing is shared with other ranks.
    """

    def __init__(self, work, stages, num_stages):
        self._work = work
        self._stages = {stage.index: stage for stage in stages}
        self._last = num_stages - 1
        parameters = [parameter for stage in stages for parameter in stage.parameters()]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.meter = ActivationMeter(parameters)
        self.alive = Alive([*parameters, *(parameter.grad for parameter in parameters)])
        self._kept = {}

    def forward(self, key, value, keep):
        stage, microbatch = key
        criterion = self._criterion(microbatch) if stage == self._last else None
        with self.alive:
            own = copied(value)
            with self.meter.watching(key):
                produced = self._stages[stage].forward(microbatch, own, 0, criterion, keep)
        # A stage holds its input, where the gradient will be.
        self._kept[key] = self.meter.keep(key, tree.tensors(own))
        return copied(produced.value)

    def _criterion(self, microbatch):
        _, targets = self._work.batch(microbatch)
        return lambda output: self._work.loss(output, targets.clone())

    def recompute(self, key, keep):
        stage, microbatch = key
        with self.alive, self.meter.watching(key):
            self._stages[stage].recompute(microbatch, keep)

    def backward(self, key, gradients):
        stage, microbatch = key
        with self.alive:
            found = self._stages[stage].backward(microbatch, copied(gradients)).inputs
        del self._kept[key]
        return copied(found)

    def backward_input(self, key, gradients):
        stage, microbatch = key
        with self.alive:
            found = self._stages[stage].backward_input(microbatch, copied(gradients)).inputs
        entries = self._stages[stage]._deferred[microbatch]._entries
        held = [tensor for entry in entries for tensor in (entry.gradient, entry.saved)]
        self._kept[key] = self.meter.keep(key, [one for one in held if one is not None])
        return copied(found)

    def backward_weight(self, key):
        stage, microbatch = key
        with self.alive:
            self._stages[stage].backward_weight(microbatch)
        del self._kept[key]

    def check(self):
        assert self.meter.live_bytes == self.alive.num_bytes()


def perform(work, schedule):
    """The ranks after all ops of a schedule; after each, the meter and the other count agree."""
    stages = work.stages(schedule.num_stages)
    ranks = [Rank(work, [stages[i] for i in own], len(stages)) for own in schedule.stages_of]
    values = {(0, k): work.batch(k)[0] for k in range(schedule.num_microbatches)}
    last = schedule.num_stages - 1
    gradients = {(last, k): [torch.ones(())] for k in range(schedule.num_microbatches)}
    for number, op in executable_order(schedule):
        rank, (stage, kind, microbatch, _) = ranks[number], op
        key = stage, microbatch
        if kind is Kind.FORWARD:
            split = op._replace(kind=Kind.BACKWARD_INPUT) in schedule.where
            keep = Keep.SPLIT if split else Keep.EVERYTHING
            values[stage + 1, microbatch] = rank.forward(key, values.pop(key), keep)
        elif kind is Kind.BACKWARD:
            gradients[stage - 1, microbatch] = rank.backward(key, gradients.pop(key))
        elif kind is Kind.BACKWARD_INPUT:
            gradients[stage - 1, microbatch] = rank.backward_input(key, gradients.pop(key))
        else:
            rank.backward_weight(key)
        rank.check()
    return ranks


@cache
def sizes_of(work, num_stages, split):
    """What a microbatch that is alone keeps at each stage."""
    stages = work.stages(num_stages)
    ranks = [Rank(work, [stage], num_stages) for stage in stages]
    value, behind_forward, behind_input = work.batch(0)[0], [], []
    for stage, rank in enumerate(ranks):
        value = rank.forward((stage, 0), value, Keep.SPLIT if split else Keep.EVERYTHING)
        behind_forward.append(rank.meter.live_bytes)
    if not split:
        return Sizes(behind_forward)
    gradients = [torch.ones(())]
    for stage in reversed(range(num_stages)):
        gradients = ranks[stage].backward_input((stage, 0), gradients)
        behind_input.insert(0, ranks[stage].meter.live_bytes)
    # Sizes takes what stays for a part of the whole; the gradients that stay, too, can be more.
    return Sizes(behind_forward, list(map(min, behind_forward, behind_input)))


def cases(names, most_stages, ranks):
    for name, num_ranks in itertools.product(names, ranks):
        try:
            built = families.build(name, num_ranks=num_ranks, num_microbatches=2 * num_ranks)
        except InputError:
            continue
        # The ranks here keep each microbatch for its own backward.
        own = built.activations == "own"
        one_copy = own and set(built.copies.values()) == {1} and built.num_slices == 1
        if one_copy and built.num_stages <= most_stages:
            yield built


FIXED = [name for name in families.names() if name not in families.SEARCHED]
CASES = [
    *((SMALL_GPT, built) for built in cases(FIXED, SMALL_GPT.num_layers, (2, 3, 4))),
    *((MLP, built) for built in cases(["gpipe", "1f1b", "breadth-first"], 6, (2, 3))),
]
IDS = [f"{'MLP' if work is MLP else 'GPT'}-{built.name}-{built.num_ranks}" for work, built in CASES]


@pytest.mark.parametrize(
    ("work", "schedule"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.soak] * (index % 3 > 0))
        for index, (case, name) in enumerate(zip(CASES, IDS, strict=True))
    ],
)
def test_the_peaks_of_microbatches_and_bytes_are_those_of_the_timeline(work, schedule):
    ranks = perform(work, schedule)
    timeline = simulate(schedule)
    split = any(op.kind is Kind.BACKWARD_INPUT for op in schedule.where)
    peak_bytes = timeline.peak_bytes(sizes_of(work, schedule.num_stages, split))
    for index, (rank, share) in enumerate(zip(ranks, units(schedule.ranks), strict=True)):
        assert rank.meter.peak_keys == timeline.peak_activations[index] * share
        assert rank.meter.peak_bytes == pytest.approx(peak_bytes[index], rel=0.05 if split else 0)
        assert rank.meter.live_bytes == 0


@pytest.mark.parametrize("num_stages", [2, 4, 6])
def test_a_profile_predicts_what_each_stage_keeps(num_stages):
    inputs, targets = SMALL_GPT.batch(0)
    graph = profile(SMALL_GPT.build_model(), inputs, loss=loss, targets=targets, repeats=1, ranks=0)
    predicted = [
        sum(layer.activation_bytes for layer in graph.layers[start:stop])
        for start, stop in SMALL_GPT.cuts(num_stages)
    ]
    counted = sizes_of(SMALL_GPT, num_stages, False).activation
    assert predicted == pytest.approx(counted, rel=0.05)


@pytest.mark.parametrize("keep", [Keep.EVERYTHING, Keep.SPLIT])
def test_a_stage_that_recomputes_keeps_its_input_only_until_then(keep):
    rank = Rank(SMALL_GPT, [SMALL_GPT.stages(2)[1]], 2)
    hidden = torch.randn(2, 8, 16)
    rank.forward((1, 0), hidden, Keep.INPUT)
    assert rank.meter.live_bytes == hidden.nbytes
    rank.check()
    rank.recompute((1, 0), keep)
    whole = sizes_of(SMALL_GPT, 2, keep is Keep.SPLIT).activation[1]
    assert rank.meter.live_bytes == whole
    rank.check()


def test_layers_that_recompute_keep_their_inputs_only():
    layers = spine_of(SMALL_GPT.build_model())[1:4]
    hidden = torch.randn(2, 8, 16)
    rank = Rank(SMALL_GPT, [Stage(1, layers, 1, LayerStreams(0), recompute_layers=True)], 3)
    rank.forward((1, 0), hidden, Keep.EVERYTHING)
    assert rank.meter.live_bytes == 3 * hidden.nbytes
    rank.check()


def test_between_the_halves_of_a_backward_more_may_stay_than_before():
    # The inputs of linear layers are nearly all that was kept; their outputs' gradients join them.
    rank = Rank(MLP, [MLP.stages(2)[1]], 3)
    rank.forward((1, 0), torch.randn(8, 32), Keep.SPLIT)
    before = rank.meter.live_bytes
    rank.backward_input((1, 0), [torch.randn(8, 4)])
    assert rank.meter.live_bytes > before
    rank.check()
