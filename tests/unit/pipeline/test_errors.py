"""Everything that can go wrong in threads: the right error, soon, and nothing left hanging."""

from __future__ import annotations

import copy
import os
import signal
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as pk
from penstock.base.errors import (
    DeadlineError,
    InputError,
    ModelError,
    PeerError,
    RunError,
    StageError,
)
from penstock.engine.run.drive import threads
from penstock.trial.reference.single_device import SingleDevice
from tests.kit import training
from tests.kit.examples import more
from tests.kit.helpers import make_batch, make_mlp, make_plan
from tests.kit.training import sgd

SOON_SECONDS = 200  # far more than any of these needs, far less than the deadline


def pipeline_of(model, num_ranks=3, **options):
    options = {"optimizer": sgd, "deadline_seconds": 600, **options}
    return training.pipeline_of(model, num_ranks=num_ranks, **options)


class Trouble:
    """Makes trouble at the n-th forward (or backward) of a layer, as long as it is armed."""

    def __init__(self, layer, act, at=2, backward=False):
        self.act, self.at, self.calls, self.armed = act, at, 0, True
        if backward:
            layer.register_forward_hook(
                lambda _, __, output: output.register_hook(lambda _: self.call()) and None
            )
        else:
            layer.register_forward_pre_hook(lambda *_: self.call())

    def call(self):
        self.calls += 1
        if self.armed and self.calls == self.at:
            self.act()


def boom():
    raise ValueError("boom")


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("layer", [0, 3, 5])
def test_an_error_of_a_stage_is_named_soon_and_the_step_can_be_repeated(layer, backward):
    ours = make_mlp()
    theirs = copy.deepcopy(ours)
    reference = SingleDevice(theirs, 4, F.cross_entropy, sgd, seed=3)
    # Not later: the last stage may then be through and have updated its weights.
    microbatch = 0 if backward else 1
    trouble = Trouble(ours[layer], boom, microbatch + 1, backward)
    with pipeline_of(ours) as pipeline:
        start = time.monotonic()
        kind, stage = ("B" if backward else "F"), {0: 0, 3: 1, 5: 2}[layer]
        op = f"{stage}{kind}{microbatch}"
        message = f"(?m)stage {stage}, microbatch {microbatch}, op {op}: ValueError: boom$"
        with pytest.raises(StageError, match=message) as caught:
            pipeline.step(*make_batch(8))
        assert time.monotonic() - start < SOON_SECONDS
        assert isinstance(caught.value.__cause__, ValueError)
        assert all(parameter.grad is None for parameter in ours.parameters())
        trouble.armed = False
        for seed in range(2):
            batch = make_batch(8, seed=seed)
            assert torch.equal(pipeline.step(*batch), reference.step(*batch))
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_an_error_of_the_loss_is_named():
    model = make_mlp()
    with (
        pipeline_of(model, loss=lambda *_: boom()) as pipeline,
        pytest.raises(StageError, match="stage 2, microbatch 0, op 2F0: ValueError: boom"),
    ):
        pipeline.step(*make_batch(8))


def test_a_loss_that_is_no_number_is_named():
    with (
        pipeline_of(make_mlp(), loss=lambda output, _: output) as pipeline,
        pytest.raises(
            StageError, match=r"op 2F0: InputError: the loss must be one number.*\(2, 4\)"
        ),
    ):
        pipeline.step(*make_batch(8))


class Failing(torch.optim.SGD):
    """Fails for the parameters of one stage."""

    def step(self, closure=None):
        if self.param_groups[0]["params"][0].shape == (32, 16):  # stage 0, the last to update
            boom()
        return super().step(closure)


def test_after_a_half_finished_update_no_step_is_possible():
    model = make_mlp()
    with pipeline_of(model, optimizer=lambda p: Failing(p, lr=0.1)) as pipeline:
        with pytest.raises(
            StageError, match="stage 0, microbatch 3, op 0UPDATE3: ValueError: boom"
        ):
            pipeline.step(*make_batch(8))
        for call in (pipeline.step, lambda inputs, _: pipeline.evaluate(inputs)):
            with pytest.raises(
                RunError,
                match="some stages were updated and others were not; restore the weights and build",
            ):
                call(*make_batch(8))


def test_a_failed_evaluation_does_no_harm():
    model = make_mlp()
    trouble = Trouble(model[3], boom)
    with pipeline_of(model) as pipeline:
        with pytest.raises(StageError, match="op 1F1: ValueError"):
            pipeline.evaluate(make_batch(8)[0])
        assert model.training
        trouble.armed = False
        assert pipeline.evaluate(make_batch(8)[0]).shape == (8, 4)
        assert pipeline.step(*make_batch(8)).isfinite()


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_a_stage_that_asks_to_exit_is_heard(error):
    model = make_mlp()

    def act():
        raise error("enough")

    Trouble(model[3], act)
    with pipeline_of(model) as pipeline:
        with pytest.raises(error, match="enough"):
            pipeline.step(*make_batch(8))
        assert pipeline.step(*make_batch(8)).isfinite()


@pytest.fixture
def short_grace(monkeypatch):
    monkeypatch.setattr(threads, "_GRACE_SECONDS", 1.0)


# Ranks 0 and 1 hang in laws/test_fault_laws.py, too.
@pytest.mark.parametrize("rank", [more(0), more(1), 2])
def test_a_stage_that_hangs_is_given_up_at_the_deadline(rank, short_grace):
    released = threading.Event()
    model = make_mlp()
    Trouble(model[2 * rank], lambda: released.wait(600), at=6)
    pipeline = pipeline_of(model, deadline_seconds=0.5)
    pipeline.step(*make_batch(8))  # the first one may take longer
    start = time.monotonic()
    with pytest.raises(
        DeadlineError, match=rf"did not answer within 0\.5 s.*rank {rank} still runs"
    ):
        pipeline.step(*make_batch(8))
    with pytest.raises(RunError, match=f"rank {rank} still runs an op.*build a new Pipeline"):
        pipeline.step(*make_batch(8))
    pipeline.close()
    assert time.monotonic() - start < SOON_SECONDS
    released.set()


def test_a_first_step_has_a_deadline_of_its_own_and_so_has_a_first_evaluation():
    model = make_mlp()
    trouble = Trouble(model[2], lambda: time.sleep(1), at=2)
    with pipeline_of(model, deadline_seconds=0.1, startup_seconds=60) as pipeline:
        assert pipeline.step(*make_batch(8)).isfinite()
        trouble.at = trouble.calls + 2
        assert pipeline.evaluate(make_batch(8)[0]).isfinite().all()
        trouble.at = trouble.calls + 2
        with pytest.raises(DeadlineError, match=r"within 0\.1 s.*raise deadline_seconds"):
            pipeline.step(*make_batch(8))
    with (
        pipeline_of(model := make_mlp(), startup_seconds=0.1) as pipeline,
        pytest.raises(DeadlineError, match=r"within 0\.1 s.*raise startup_seconds"),
    ):
        Trouble(model[2], lambda: time.sleep(1))
        pipeline.step(*make_batch(8))


def test_a_slow_stage_ends_with_the_deadline_and_may_go_on_afterwards():
    model = make_mlp()
    trouble = Trouble(model[2], lambda: time.sleep(4), at=6)
    with pipeline_of(model, deadline_seconds=2) as pipeline:
        pipeline.step(*make_batch(8))
        with pytest.raises(DeadlineError, match="raise deadline_seconds"):
            pipeline.step(*make_batch(8))
        trouble.armed = False
        assert pipeline.step(*make_batch(8)).isfinite()


@pytest.fixture
def interrupt_from():
    """Starts a thread that presses Ctrl-C once an event has happened."""
    helpers = []

    def start(event):
        def press():
            if event.wait(30):
                os.kill(os.getpid(), signal.SIGINT)

        helpers.append(threading.Thread(target=press))
        helpers[-1].start()

    # A job in the background of a shell is born deaf to it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield start
    for helper in helpers:
        helper.join()
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_stops_all_ranks_and_the_next_step_is_right(interrupt_from, monkeypatch):
    ours = make_mlp()
    theirs = copy.deepcopy(ours)
    entered, cancelled = threading.Event(), threading.Event()

    def act():
        entered.set()
        cancelled.wait(30)  # or the step might be through before the interrupt is heard

    trouble = Trouble(ours[3], act)
    interrupt_from(entered)
    with pipeline_of(ours) as pipeline:
        last = pipeline._parts.driver._workers[-1].transport
        fail = last.fail
        monkeypatch.setattr(last, "fail", lambda *notice: (fail(*notice), cancelled.set()))
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            pipeline.step(*make_batch(8))
        assert time.monotonic() - start < SOON_SECONDS
        trouble.armed = False
        reference = SingleDevice(theirs, 4, F.cross_entropy, sgd, seed=3)
        assert torch.equal(pipeline.step(*make_batch(8)), reference.step(*make_batch(8)))
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("again", [False, True])
def test_an_interrupt_between_beginning_a_step_and_waiting_for_it_stops_it(again, monkeypatch):
    ours = make_mlp()
    theirs = copy.deepcopy(ours)
    interrupted = threading.Event()
    Trouble(ours[0], lambda: interrupted.wait(30), at=1)
    with pipeline_of(ours) as pipeline:
        driver = pipeline._parts.driver

        def press(*_):
            interrupted.set()
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(driver, "collect", press)
            if again:  # a second one, while the first is dealt with
                patch.setattr(driver, "break_off", press)
            with pytest.raises(KeyboardInterrupt):
                pipeline.step(*make_batch(8))
        assert again or not driver._under_way
        try:
            loss = pipeline.step(*make_batch(8))
        except RunError as error:
            assert again  # the step went on and has changed weights
            assert "restore the weights" in str(error)
        else:
            reference = SingleDevice(theirs, 4, F.cross_entropy, sgd, seed=3)
            assert torch.equal(loss, reference.step(*make_batch(8)))


def test_an_interrupt_during_a_hang_leaves_soon(short_grace, interrupt_from):
    released, entered = threading.Event(), threading.Event()
    model = make_mlp()

    def act():
        entered.set()
        released.wait(60)

    Trouble(model[3], act)
    interrupt_from(entered)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt), pipeline_of(model) as pipeline:
        pipeline.step(*make_batch(8))
    with pytest.raises(InputError, match="closed"):
        pipeline.step(*make_batch(8))
    assert time.monotonic() - start < SOON_SECONDS
    released.set()


def test_an_interrupt_before_all_ranks_have_their_work_makes_no_mess(monkeypatch, short_grace):
    pipeline = pipeline_of(make_mlp())
    inbox = pipeline._parts.driver._inboxes[1]

    class Interrupting:
        def put(self, work):
            if work is not None:
                raise KeyboardInterrupt
            inbox.put(work)

    pipeline._parts.driver._inboxes[1] = Interrupting()
    with pytest.raises(KeyboardInterrupt):
        pipeline.step(*make_batch(8))
    pipeline._parts.driver._inboxes[1] = inbox
    assert pipeline.step(*make_batch(8)).isfinite()
    pipeline.close()


def test_a_second_interrupt_while_ranks_still_stop_makes_no_mess(monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with pipeline_of(make_mlp()) as pipeline:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(threads.ThreadTicket, "all_went_well", interrupted)
            patch.setattr(threads.ThreadTicket, "still_running", interrupted)
            pipeline.step(*make_batch(8))
        with pytest.raises(RunError, match=r"the last step was broken off; .*build a new Pipeline"):
            pipeline.step(*make_batch(8))


def test_the_cause_is_reported_and_not_the_cancelled_peers():
    for _ in range(20):
        model = make_mlp()
        Trouble(model[5], boom, at=1)
        with pipeline_of(model) as pipeline, pytest.raises(RunError) as caught:
            pipeline.step(*make_batch(8))
        assert not isinstance(caught.value, PeerError)


def test_failures_leave_no_threads():
    before = threading.active_count()
    for act in (boom, lambda: time.sleep(0.4)):
        model = make_mlp()
        Trouble(model[3], act)
        with pipeline_of(model, startup_seconds=0.2) as pipeline, pytest.raises(RunError):
            pipeline.step(*make_batch(8))
    assert threading.active_count() == before


INPUTS, TARGETS = make_batch(8)


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        (INPUTS, TARGETS[:5], "inputs have 8 rows, but targets have 5"),
        (INPUTS[:0], TARGETS[:0], "inputs have no rows"),
        (torch.tensor(1.0), TARGETS, "inputs hold a tensor without dimensions"),
        (INPUTS, torch.tensor(1), "targets hold a tensor without dimensions"),
        (INPUTS, [1, 2], "targets hold no tensor"),
        (None, TARGETS, "inputs hold no tensor"),
        ((INPUTS, INPUTS[:2]), TARGETS, r"8 in inputs\[0\] .*, 2 in inputs\[1\] "),
    ],
)
def test_batches_that_do_not_fit_are_refused_and_change_nothing(inputs, targets, message):
    model = make_mlp()
    with pipeline_of(model) as pipeline:
        with pytest.raises(InputError, match=message):
            pipeline.step(inputs, targets)
        assert pipeline.step(INPUTS, TARGETS).isfinite()


def test_a_loader_that_fails_or_ends_leaves_the_pipeline_usable():
    # DeepSpeed #5593: a loader exhausted on some stages hung the others.
    def loader():
        yield make_batch(8)
        raise OSError("disk gone")

    model, steps = make_mlp(), 0
    with pipeline_of(model) as pipeline:
        with pytest.raises(OSError, match="disk gone"):
            for batch in loader():
                pipeline.step(*batch)
                steps += 1
        assert pipeline.step(*make_batch(8)).isfinite()
    assert steps == 1


def test_evaluating_needs_no_loss_and_stepping_does():
    model = make_mlp()
    with pipeline_of(model, loss=None) as pipeline:
        assert pipeline.evaluate(INPUTS).shape == (8, 4)
        with pytest.raises(InputError, match="built without a loss; give loss=… to train"):
            pipeline.step(INPUTS, TARGETS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deadline_seconds": 0}, "deadline_seconds is 0, but must be > 0"),
        ({"deadline_seconds": -1.0}, "must be > 0"),
        ({"deadline_seconds": float("nan")}, "must be > 0"),
        ({"deadline_seconds": float("inf")}, "> 0 and finite"),
        ({"startup_seconds": 0}, "startup_seconds is 0, but must be > 0"),
        ({"transport": "carrier pigeon"}, "'carrier pigeon'; use auto or threads or shared-memory"),
        ({"reduction": "max"}, "reduction is 'max'; use mean or sum"),
        ({"reduction": "sum", "weight": len}, "a sum needs none"),
    ],
)
def test_contradictory_options_are_refused(options, message):
    before = threading.active_count()
    with pytest.raises(InputError, match=message):
        pipeline_of(make_mlp(), **options)
    assert threading.active_count() == before


def test_an_optimizer_that_cannot_be_built_leaves_no_threads():
    before = threading.active_count()
    with pytest.raises(ValueError, match="boom"):
        pipeline_of(make_mlp(), optimizer=lambda _: boom())
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (make_mlp()[:5], r"another model \(not in the plan: none; not in the model: 5\)"),
        (nn.Sequential(*make_mlp(), nn.ReLU()), "not in the plan: 6; not in the model: none"),
        (make_mlp(dtype=torch.float64), "same names but other parameter shapes or dtypes"),
        (nn.Linear(2, 2), r"another model \(not in the plan: Linear; not in the model: 0, 1"),
    ],
)
def test_a_plan_for_another_model_is_refused(other, message):
    # Megatron #1304: 30 layers over 4 stages silently dropped 2.
    with pytest.raises(ModelError, match=message):
        pk.Pipeline(other, make_plan(make_mlp(), 2, 2))


def test_a_plan_of_another_order_is_refused():
    class Model(nn.Module):
        def __init__(self, order):
            super().__init__()
            self.a, self.b, self.order = nn.Linear(2, 2), nn.Linear(2, 2), order

        def spine(self):
            return [getattr(self, name) for name in self.order]

    with pytest.raises(ModelError, match="the order of the layers differs"):
        pk.Pipeline(Model("ba"), make_plan(Model("ab"), 2, 2))
