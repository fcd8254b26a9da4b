"""What belongs to weights of which there are several copies: hooks, attributes, buffers. Against
one device."""

from __future__ import annotations

import copy
import functools
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

from penstock.base.errors import ModelError, StageError
from penstock.demo import gpt
from tests.kit import training
from tests.kit.helpers import make_batch, make_mlp
from tests.kit.one_device import OneDevice, assert_same, assert_same_gradients, same
from tests.kit.training import sgd
from tests.numerics.test_one_logical_model_shared import TiedGPT, token_batch

TOLERANCE = 1e-12
"""Where sums have another order, in float64."""


def pipeline_of(model, schedule="chimera", *how, **options):
    return training.pipeline_of(model, schedule, *how, **options)


def pair():
    ours = make_mlp(0.0, torch.float64)
    return ours, copy.deepcopy(ours)


def batch_of(step=0, rows=13):
    return make_batch(rows, torch.float64, seed=step)


def clamp(model):
    """Gradients of every microbatch are clamped and then become larger."""
    return [one.register_hook(lambda g: g.clamp(-1e-3, 1e-3) + 1e-3) for one in model.parameters()]


def assert_trains_alike(ours, theirs, change, **options):
    """Over steps; both models are changed after the first."""
    reference = OneDevice(theirs, 4, optimizer=sgd)
    with pipeline_of(ours, optimizer=sgd, **options) as pipeline:
        for step in range(4):
            if step == 1:
                change(ours)
                change(theirs)
            batch = batch_of(step, rows=3 if step == 2 else 13)
            assert same(pipeline.step(*batch), reference.step(*batch), TOLERANCE)
    assert_same(ours, theirs, 1e-11)


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_on_parameters_see_what_every_microbatch_brings(when):
    ours, theirs = pair()
    if when == "before":
        clamp(ours)
        clamp(theirs)
    assert_trains_alike(ours, theirs, clamp if when == "after" else len)


def test_hooks_that_are_removed_are_gone_from_every_copy():
    ours, theirs = pair()
    hooks = clamp(ours) + clamp(theirs)
    assert_trains_alike(ours, theirs, lambda _: [hook.remove() for hook in hooks])


def double(module, args, output):
    return output * 2


def shift(module, args, kwargs):
    return (args[0] + 1, *args[1:]), kwargs


def scale_backward(module, gradient):
    return (gradient[0] * 3,)


MODULE_HOOKS = {
    "forward": lambda layer: layer.register_forward_hook(double),
    "forward pre": lambda layer: layer.register_forward_pre_hook(shift, with_kwargs=True),
    "backward pre": lambda layer: layer.register_full_backward_pre_hook(scale_backward),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", MODULE_HOOKS)
def test_hooks_on_modules_reach_every_copy(kind, when):
    def register(model):
        # Behind the others something works in place, which hooks of backwards do not allow.
        return [MODULE_HOOKS[kind](model[at]) for at in ((0, 3, 5) if "forward" in kind else (5,))]

    ours, theirs = pair()
    if when == "before":
        register(ours)
        register(theirs)
    assert_trains_alike(ours, theirs, register if when == "after" else len)


def test_module_hooks_that_are_removed_are_gone_from_every_copy():
    ours, theirs = pair()
    hooks = [model[5].register_forward_hook(double) for model in (ours, theirs)]
    assert_trains_alike(ours, theirs, lambda _: [hook.remove() for hook in hooks])


class Normalised(nn.Linear):
    """Computes its weight in a hook that is a method of its own."""

    def __init__(self, inputs, outputs, how):
        super().__init__(inputs, outputs)
        self.raw = nn.Parameter(self.weight.detach().clone())
        del self.weight
        if how == "method":
            self.register_forward_pre_hook(self.prepare)
        else:
            self.register_forward_pre_hook(functools.partial(Normalised.prepare, self))

    def prepare(self, *_):
        self.weight = F.normalize(self.raw, dim=1)


@pytest.mark.parametrize("how", ["method", "partial"])
def test_hooks_that_are_methods_of_a_module_are_those_of_its_copy(how):
    torch.manual_seed(0)
    ours = nn.Sequential(Normalised(16, 8, how), nn.Tanh(), Normalised(8, 4, how)).double()
    assert_trains_alike(ours, copy.deepcopy(ours), len)


REPARAMETRIZED = {
    "weight_norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
    "old weight_norm": weight_norm,
}


@pytest.mark.parametrize("name", REPARAMETRIZED)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_reparametrized_layers_may_have_copies(name):
    torch.manual_seed(0)
    layers = [nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4)]
    ours, theirs = (
        nn.Sequential(*(copy.deepcopy(layer).double() for layer in layers)) for _ in range(2)
    )
    for model in (ours, theirs):
        REPARAMETRIZED[name](model[0])
        REPARAMETRIZED[name](model[2])
    theirs.load_state_dict(ours.state_dict())
    assert_trains_alike(ours, theirs, len)


class Scaling(nn.Linear):
    factor, function = 1.0, staticmethod(torch.tanh)

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.kept = None

    def forward(self, value):
        self.kept = value * self.factor  # must not be another thread's
        threading.Event().wait(0.001)
        return self.function(super().forward(self.kept))


def test_attributes_that_are_set_between_steps_are_set_in_every_copy():
    def change(model):
        model[0].factor = 3.0
        model[1].function = F.silu

    torch.manual_seed(0)
    ours = nn.Sequential(Scaling(16, 8), Scaling(8, 4)).double()
    assert_trains_alike(ours, copy.deepcopy(ours), change)


def test_modules_without_parameters_keep_what_is_theirs_apart():
    class Keeping(nn.Module):
        def forward(self, value):
            self.kept = value.square()
            threading.Event().wait(0.001)
            return value * self.kept

    keeping = Keeping()
    torch.manual_seed(0)
    first, last = nn.Linear(16, 8).double(), nn.Linear(8, 4).double()
    ours = nn.Sequential(first, keeping, last, keeping)
    assert_trains_alike(ours, copy.deepcopy(ours), len, schedule="1f1b")


def test_buffers_that_a_tied_layer_assigns_are_the_models():
    class Head(nn.Linear):
        def __init__(self):
            super().__init__(16, 16)
            self.register_buffer("count", torch.zeros((), dtype=torch.float64))

        def forward(self, value):
            self.count = self.count + 1
            return super().forward(value) / self.count

    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), Head()).double()
    ours[0].weight = ours[2].weight
    theirs = copy.deepcopy(ours)
    assert_trains_alike(ours, theirs, len, schedule="1f1b")
    assert ours[2].count == theirs[2].count == 15


def test_what_parameters_tell_optimizers_is_told_by_every_copy():
    def decaying(parameters):
        free = [one for one in parameters if getattr(one, "free", False)]
        bound = [one for one in parameters if not getattr(one, "free", False)]
        groups = [{"params": free}, {"params": bound, "weight_decay": 0.5}]
        return torch.optim.SGD(groups, lr=0.1)

    ours, theirs = pair()
    for model in (ours, theirs):
        model[0].weight.free = model[5].bias.free = True
    reference = OneDevice(theirs, 4, optimizer=decaying)
    batches = [batch_of(step) for step in range(4)]
    with pipeline_of(ours, optimizer=decaying) as pipeline:
        for loss, batch in zip(pipeline.steps(batches), batches, strict=True):
            assert same(loss, reference.step(*batch), TOLERANCE)
    assert_same(ours, theirs, 1e-11)


def test_parts_that_are_exchanged_afterwards_are_refused():
    ours, _ = pair()
    with pipeline_of(ours) as pipeline:
        parametrizations.weight_norm(ours[3])
        with pytest.raises(ModelError, match="layer '3' has got other modules or parameters"):
            pipeline.step(*batch_of())


def test_attributes_that_cannot_be_copied_are_refused_by_name():
    ours, _ = pair()
    with pipeline_of(ours) as pipeline:
        ours[0].lock = threading.Lock()
        with pytest.raises(ModelError, match="attribute 'lock' of layer '0' has changed"):
            pipeline.step(*batch_of())
    with pytest.raises(ModelError, match="layer '0' must be copied, since several ranks run it"):
        pipeline_of(ours)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("schedule", "num_ranks"), [("1f1b", 2), ("zb-v", 2), ("chimera", 2)])
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_weights_that_stages_share_are_refused(kind, schedule, num_ranks, when):
    model = TiedGPT()

    def register():
        getattr(model.embedding.tokens.weight, kind)(lambda gradient: None)

    told = r"'embedding\.tokens\.weight' has hooks.* stages 0, \d each have a part of the gradient"
    if when == "before":
        register()
        with pytest.raises(ModelError, match=told):
            pipeline_of(model, schedule, num_ranks, loss=gpt.loss)
        return
    with pipeline_of(model, schedule, num_ranks, loss=gpt.loss) as pipeline:
        register()
        for call in (pipeline.step, lambda *batch: list(pipeline.steps([batch]))):
            with pytest.raises(ModelError, match=told):
                call(*token_batch())


def test_tied_weights_within_one_stage_may_have_hooks():
    ours = TiedGPT()
    ours.head.norm.register_forward_hook(double)
    theirs = copy.deepcopy(ours)
    for model in (ours, theirs):
        model.embedding.tokens.weight.register_hook(lambda gradient: gradient.clamp(-1e-2, 1e-2))
    reference = OneDevice(theirs, 4, gpt.loss)
    with pipeline_of(ours, "1f1b", 1, loss=gpt.loss) as pipeline:
        pipeline.step(*token_batch())
        reference.step(*token_batch())
    assert_same_gradients(ours, theirs)


def accumulated(gradient):
    gradient.clamp_(-0.01, 0.01)


def test_hooks_on_what_accumulates_in_several_copies_are_refused():
    ours, theirs = pair()
    hook = ours[3].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ModelError, match=r"'3\.weight' has hooks.* ranks 0, 1 each accumulate"):
        pipeline_of(ours)
    hook.remove()
    for model in (ours, theirs):
        model[5].weight.register_post_accumulate_grad_hook(
            lambda parameter: accumulated(parameter.grad)
        )
    assert_trains_alike(ours, theirs, len, schedule="1f1b")


def test_hooks_on_parameters_are_refused_where_microbatches_are_sliced():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11))
    model[1].weight.register_hook(lambda gradient: gradient)
    with pytest.raises(ModelError, match="slices of a microbatch each have a part"):
        pipeline_of(model, "seq1f1b")


WRITERS = {
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(16, 4)),
    "old spectral norm": lambda: spectral_norm(nn.Linear(16, 4)),
    "in place": lambda: Written(lambda self: self.count.add_(1)),
    "assigned": lambda: Written(lambda self: setattr(self, "count", self.count + 1)),
    "without a trace": lambda: Written(lambda self: self.count.data.add_(1)),
    "from none": lambda: Written(lambda self: setattr(self, "cache", torch.ones(1))),
    "another shape": lambda: Written(lambda self: setattr(self, "count", torch.ones(3))),
    "batch norm": lambda: Written(
        lambda self: F.batch_norm(torch.randn(4, 1), self.count, self.variance, training=True)
    ),
    "weights": lambda: Written(lambda self: self.weight.detach().clamp_(-1, 1)),
}


class Written(nn.Linear):
    """Writes a buffer in training."""

    def __init__(self, write):
        super().__init__(16, 4)
        self.write = write
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("variance", torch.ones(1))
        self.register_buffer("cache", None)

    def forward(self, value):
        with torch.no_grad():
            if self.training:
                self.write(self)
        return super().forward(value)


@pytest.mark.parametrize("method", ["step", "steps"])
@pytest.mark.parametrize("name", WRITERS)
def test_what_a_forward_writes_in_a_stage_with_copies_is_refused_before_weights_change(
    name, method
):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), WRITERS[name]())
    weights = [one.detach().clone() for one in model.parameters()]
    with pipeline_of(model, optimizer=sgd) as pipeline:
        batch = make_batch(13)
        pipeline.evaluate(batch[0])
        with pytest.raises(StageError, match=r"has written the .* which ranks 0, 1 hold"):
            _ = pipeline.step(*batch) if method == "step" else list(pipeline.steps([batch] * 3))
    if name != "weights":
        assert all(map(torch.equal, model.parameters(), weights))


@pytest.mark.parametrize("name", ["spectral norm", "in place", "assigned", "without a trace"])
def test_what_a_forward_writes_in_a_stage_without_copies_is_as_on_one_device(name):
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(16, 16), WRITERS[name]()).double()
    theirs = copy.deepcopy(ours)
    assert_trains_alike(ours, theirs, len, schedule="1f1b")


class Counting(nn.Module):
    """Counts in a buffer that others may read."""

    def __init__(self, count, step):
        super().__init__()
        self.register_buffer("count", count)
        self.step = step

    def forward(self, value):
        self.count += self.step
        return value * self.count.clone()


@pytest.mark.parametrize(("schedule", "holders"), [("1f1b", "ranks 0, 1"), ("zb-v", "stages 0, 3")])
def test_a_buffer_that_one_stage_writes_and_another_reads_is_refused(schedule, holders):
    def build(step):
        torch.manual_seed(0)
        count = torch.ones(1, dtype=torch.float64)
        ends = nn.Linear(16, 8).double(), nn.Linear(8, 4).double()
        readers = Counting(count, step), Counting(count, 0)
        return nn.Sequential(ends[0], readers[0], nn.Tanh(), nn.Tanh(), ends[1], readers[1])

    cuts = [3] if schedule == "1f1b" else [2, 3, 4]
    with (
        pipeline_of(build(1), schedule, cuts=cuts) as pipeline,
        pytest.raises(StageError, match=rf"buffer '1\.count' of layer '1', which {holders} hold"),
    ):
        pipeline.step(*batch_of())


def test_a_norm_in_two_stages_of_one_rank_is_refused_unless_it_follows_whole_minibatches():
    def build():
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(16)
        ends = nn.Linear(16, 16), nn.Linear(16, 4)
        return nn.Sequential(norm, ends[0], nn.Tanh(), norm, ends[1]).double()

    options = {"schedule": "zb-v", "cuts": [1, 2, 3]}
    with (
        pipeline_of(build(), **options) as pipeline,
        pytest.raises(StageError, match=r"has written the buffer '0\.num_batches_tracked'"),
    ):
        pipeline.step(*batch_of())
    with pipeline_of(build(), **options, batch_norm="minibatch") as pipeline:
        assert pipeline.step(*batch_of()).isfinite()


def test_buffers_that_are_only_read_may_have_copies_and_change_between_steps():
    def change(model):
        model[1].scale = model[1].scale * 2
        model[1].table.mul_(3)

    class Reading(nn.Linear):
        def __init__(self):
            super().__init__(16, 4)
            self.register_buffer("scale", torch.full((4,), 2.0))
            self.register_buffer("table", torch.tensor([1.0, float("inf")]))
            self.register_buffer("unknown", torch.tensor([float("nan")]))

        def forward(self, value):
            return super().forward(value) * self.scale * self.table[0]

    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(16, 16), Reading()).double()
    ours[1].unknown = None
    assert_trains_alike(ours, copy.deepcopy(ours), change)
    with pipeline_of(nn.Sequential(nn.Linear(16, 16), Reading())) as pipeline:
        assert pipeline.step(*make_batch(13)).isfinite()
