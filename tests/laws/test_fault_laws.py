"""Nothing hangs in threads: whatever fails, wherever and whenever, the step ends with its cause."""

from __future__ import annotations

import copy
import gc
import itertools
import re
import threading
import time
import weakref
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch.optim.lr_scheduler import LambdaLR

import penstock as pk
from penstock.base.errors import DeadlineError, InputError, RunError, StageError
from penstock.engine.run.drive import threads
from penstock.trial.reference.single_device import SingleDevice
from tests.kit.examples import TIMES, crossed
from tests.kit.helpers import (
    MLP_LAYERS,
    make_batch,
    make_mlp,
    make_plan,
    runnable_cases,
    same_order_families,
)

DEADLINE_SECONDS = 300.0  # far more than a step needs
NUM_STEPS = 3
CASES = runnable_cases((2, 3, 4), (2, 4))
SAME_ORDER = set(same_order_families())
UPDATES = ("plain", "clip", "post-validate")
KINDS = ("forward", "backward", "loss", "nan", "metric", "optimizer", "lr_scheduler")
BEFORE_ALL_UPDATES = {"forward", "loss", "nan", "metric"}


class Fault(NamedTuple):
    """Something goes wrong at the ``call``-th time that user code of a kind runs."""

    kind: str
    layer: int
    call: int

    @property
    def hooks_layer(self) -> bool:
        return self.kind in ("forward", "backward")


class Boom(Exception):
    """What user code raises; cannot be pickled, as many exceptions cannot."""

    def __init__(self):
        super().__init__("boom")
        self.lock = threading.Lock()


class Armed:
    """Counts the calls of user code, raises in one of them, and sees which tensors stay alive."""

    def __init__(self, fault, act):
        self.fault, self.act = fault, act
        self.arm()
        self._seen: list[weakref.ref] = []

    def arm(self):
        self.armed, self._calls = True, itertools.count(1)

    def call(self, kind):
        if kind == self.fault.kind and next(self._calls) == self.fault.call and self.armed:
            self.act()
            return True
        return False

    def plant(self, model):
        for layer in model:
            layer.register_forward_pre_hook(lambda _, args: self._seen.append(weakref.ref(args[0])))
        layer = model[self.fault.layer]
        if self.fault.kind == "forward":
            layer.register_forward_pre_hook(lambda *_: self.watch("forward"))
        if self.fault.kind == "backward":
            layer.register_forward_hook(
                lambda _, __, output: (
                    output.register_hook(lambda _: self.watch("backward")) and None
                )
            )

    def watch(self, kind):
        """As a hook, which would change what it returns."""
        self.call(kind)

    def num_alive(self):
        gc.collect()
        return sum(ref() is not None for ref in self._seen)


class Recipe(NamedTuple):
    """What a pipeline and a single device train with, the same on both."""

    armed: Armed
    update: str

    def loss(self, outputs, targets):
        self.armed.call("loss")
        value = F.cross_entropy(outputs, targets)
        return value * float("nan") if self.armed.call("nan") else value

    def metric(self, outputs, targets):
        self.armed.call("metric")
        return (outputs.argmax(1) == targets).double().mean()

    def optimizer(self, parameters):
        armed = self.armed

        class Optimizer(torch.optim.SGD):
            def step(self, closure=None):
                armed.call("optimizer")
                return super().step(closure)

        return Optimizer(parameters, lr=0.1, momentum=0.9)

    def lr_scheduler(self, optimizer):
        def factor(epoch):
            if epoch:
                self.armed.call("lr_scheduler")
            return 1.0

        return LambdaLR(optimizer, factor)

    def options(self):
        found = {
            "loss": self.loss,
            "optimizer": self.optimizer,
            "lr_scheduler": self.lr_scheduler,
            "metrics": {"right": self.metric},
        }
        if self.update != "plain":
            found |= {"clip_norm": 1.0, "post_validate": self.update == "post-validate"}
        return found


def single_device(model, num_microbatches, update):
    class Clipping(torch.optim.SGD):
        def step(self, closure=None):
            if update != "plain":
                torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
            return super().step(closure)

    def optimizer(parameters):
        return Clipping(parameters, lr=0.1, momentum=0.9)

    return SingleDevice(model, num_microbatches, F.cross_entropy, optimizer, seed=3)


def batch_of(step):
    inputs, targets = make_batch(8, seed=step)
    return 3 * inputs, targets  # large enough that clipping changes something


def boom():
    raise Boom


def train(pipeline, many):
    """The losses that came, and what ended it."""
    losses = []
    batches = [batch_of(step) for step in range(NUM_STEPS)]
    source = pipeline.steps(batches) if many else (pipeline.step(*batch) for batch in batches)
    try:
        losses.extend(source)
    except RunError as error:
        return losses, error
    return losses, None


def stage_of(plan, layer):
    name = str(layer)
    return next(index for index, stage in enumerate(plan.stages) if name in stage.layers)


def check_message(error, fault, plan):
    """It names the op, and the notes tell of every rank; no neighbour is blamed."""
    assert isinstance(error, StageError), repr(error)
    what = "ArithmeticError: the loss is nan" if fault.kind == "nan" else "Boom: boom"
    # What is validated at the end of a step belongs to no op.
    named = r"rank \d, stage \d, microbatch \d, op \d[A-Z]+\d|rank \d, step \d"
    assert re.match(rf"({named}): {what}", str(error)), error
    where = int(re.search(r"stage (\d)|rank (\d), step", str(error))[1] or 0)
    if fault.hooks_layer:
        assert where == stage_of(plan, fault.layer)
    if fault.kind in ("loss", "nan", "metric"):
        assert where == len(plan.stages) - 1
    notes = "\n".join(error.__notes__)
    for rank in range(plan.num_ranks):
        assert notes.count(f"rank {rank}: did ") == 1, notes


def check_repeats(pipeline, losses, reference, same_order):
    """The next step gives the result of one device, or the pipeline says why it cannot."""
    expected = [reference.step(*batch_of(step)) for step in range(len(losses) + 1)]
    try:
        losses = [*losses, pipeline.step(*batch_of(len(losses)))]
    except RunError as refusal:
        assert re.search(r"; restore the weights and build a new Pipeline$", str(refusal)), refusal
        return False
    for ours, theirs in zip(losses, expected, strict=True):
        if same_order:
            assert torch.equal(ours, theirs)
        else:
            torch.testing.assert_close(ours, theirs)
    return True


@settings(max_examples=12 * TIMES, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(
    case=st.sampled_from(CASES),
    update=st.sampled_from(UPDATES),
    many=st.booleans(),
    kind=st.sampled_from(KINDS),
    layer=st.integers(0, MLP_LAYERS - 1),
    at=st.tuples(st.integers(0, NUM_STEPS - 1), st.integers(0, 3)),
)
def test_whatever_user_code_raises_ends_the_step_soon_with_its_cause(
    case, update, many, kind, layer, at
):
    family, num_ranks, num_microbatches = case
    step, within = at
    assume(not many or update != "post-validate")
    ours = make_mlp()
    theirs = copy.deepcopy(ours)
    plan = make_plan(ours, num_ranks, num_microbatches, family)
    num_calls = num_microbatches
    if kind in ("optimizer", "lr_scheduler"):
        trained = [bool({"0", "3", "5"} & set(stage.layers)) for stage in plan.stages]
        num_calls = sum(trained[stage] for own in plan.build_schedule().stages_of for stage in own)
    fault = Fault(kind, layer - layer % 3, 1 + step * num_calls + within % num_calls)
    armed = Armed(fault, (lambda: None) if kind == "nan" else boom)
    armed.plant(ours)
    num_threads = threading.active_count()
    options = Recipe(armed, update).options()
    with pk.Pipeline(ours, plan, deadline_seconds=DEADLINE_SECONDS, seed=3, **options) as pipeline:
        # Twins of stages are copies of modules, with the same hooks.
        start = time.monotonic()
        losses, error = train(pipeline, many)
        assert time.monotonic() - start < DEADLINE_SECONDS
        assert error is not None
        check_message(error, fault, plan)
        del error
        assert armed.num_alive() == 0
        armed.armed = False
        reference = single_device(theirs, num_microbatches, update)
        repeats = check_repeats(pipeline, losses, reference, family in SAME_ORDER)
        if kind in BEFORE_ALL_UPDATES and not many:
            assert repeats
    assert threading.active_count() == num_threads


STALLS = {"forward": 1, "backward": 3, "loss": 2, "optimizer": 1}


@pytest.mark.parametrize(("kind", "layer"), crossed(STALLS, [0, 3]))
def test_a_rank_that_stalls_is_named_even_if_only_the_end_of_the_step_waits_for_it(
    kind, layer, monkeypatch
):
    monkeypatch.setattr(threads, "_GRACE_SECONDS", 1.0)
    released = threading.Event()
    num_threads = threading.active_count()
    model = make_mlp()
    armed = Armed(Fault(kind, layer, STALLS[kind]), lambda: released.wait(600))
    armed.plant(model)
    pipeline = pk.Pipeline(
        model,
        make_plan(model, 3, 4),
        deadline_seconds=0.5,
        seed=3,
        **Recipe(armed, "plain").options(),
    )
    armed.armed = False
    pipeline.step(*batch_of(0))  # the first one may take longer
    armed.arm()
    start = time.monotonic()
    with pytest.raises(DeadlineError, match=r"rank \d still runs an op") as caught:
        pipeline.step(*batch_of(0))
    assert time.monotonic() - start < DEADLINE_SECONDS
    rank = re.search(r"rank (\d) still runs an op", str(caught.value))[1]
    assert any(note.startswith(f"rank {rank}: did ") for note in caught.value.__notes__)
    with pytest.raises(RunError, match=f"rank {rank} still runs an op.*build a new Pipeline"):
        pipeline.step(*batch_of(0))
    released.set()
    pipeline.close()
    for thread in threading.enumerate():
        if thread.name.startswith("penstock rank"):
            thread.join(10)
    assert threading.active_count() == num_threads


@pytest.mark.parametrize("update", UPDATES)
def test_a_loop_over_steps_that_is_left_after_closing_does_not_hang(update):
    model = make_mlp()
    armed = Armed(Fault("nothing", 0, 0), boom)
    options = Recipe(armed, update).options()
    pipeline = pk.Pipeline(
        model, make_plan(model, 2, 4), deadline_seconds=DEADLINE_SECONDS, **options
    )
    loop = pipeline.steps(batch_of(step) for step in range(3))
    next(loop)
    pipeline.close()
    loop.close()
    with pytest.raises(InputError, match="closed"):
        pipeline.step(*batch_of(0))


def test_closing_within_a_loop_over_steps_is_refused_and_does_not_hang():
    model = make_mlp()
    options = Recipe(Armed(Fault("nothing", 0, 0), boom), "plain").options()
    pipeline = pk.Pipeline(
        model, make_plan(model, 2, 4), deadline_seconds=DEADLINE_SECONDS, **options
    )
    loop = pipeline.steps(batch_of(step) for step in range(3))
    next(loop)
    pipeline.close()
    with pytest.raises(InputError, match="closed"):
        next(loop)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_loop_over_steps_ends_with_what_a_stage_asked_for(error):
    def act():
        raise error("enough")

    model = make_mlp()
    armed = Armed(Fault("forward", 3, 6), act)
    armed.plant(model)
    options = Recipe(armed, "plain").options()
    with (
        pk.Pipeline(
            model, make_plan(model, 3, 4), deadline_seconds=DEADLINE_SECONDS, **options
        ) as pipeline,
        pytest.raises(error, match="enough"),
    ):
        list(pipeline.steps(batch_of(step) for step in range(NUM_STEPS)))
