"""``fit`` trains as the loop that people would write; callbacks see and end what they should."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import penstock as pk
from penstock.base.errors import InputError, StageError
from penstock.training.fitting.callbacks import ProgressLines
from tests.kit.helpers import make_batch, make_mlp
from tests.kit.one_device import OneDevice, assert_same
from tests.kit.training import momentum, pipeline_of, sgd

LOADER = [make_batch(8, seed=seed) for seed in range(3)]
HELD_OUT = make_batch(9, seed=9)


class Seen(pk.Callback):
    """Writes down what it is told, and wants to stop at some step or evaluation."""

    def __init__(self, stop_at=None, stop_at_evaluation=None):
        self.told = []
        self.stop_at, self.stop_at_evaluation = stop_at, stop_at_evaluation

    def on_step(self, step, loss, pipeline):
        self.told.append((step, float(loss)))
        return step == self.stop_at

    def on_evaluate(self, step, loss, pipeline):
        self.told.append(("evaluated", step, float(loss)))
        return step == self.stop_at_evaluation

    def on_end(self, pipeline):
        self.told.append("end")


def fitted(model=None, loader=LOADER, *, options=None, **how):
    with pipeline_of(model or make_mlp(0.0), optimizer=momentum, **(options or {})) as pipeline:
        return pk.fit(pipeline, loader, **{"progress": False, **how}), pipeline


@pytest.mark.parametrize("evaluate_every", [None, 2])
def test_it_trains_as_one_device_and_tells_of_every_step(evaluate_every):
    ours, theirs = make_mlp(0.0), make_mlp(0.0)
    seen = Seen()
    result, _ = fitted(
        ours, epochs=2, evaluate=HELD_OUT, evaluate_every=evaluate_every, callbacks=[seen]
    )
    reference = OneDevice(theirs, 4, optimizer=momentum)
    expected, evaluated = [], []
    for step, batch in enumerate(LOADER * 2, 1):
        expected.append((step, float(reference.step(*batch))))
        if step % (evaluate_every or 3) == 0:
            with torch.no_grad():
                held_out = reference.loss(theirs(HELD_OUT[0]), HELD_OUT[1])
            expected.append(("evaluated", step, pytest.approx(float(held_out))))
            evaluated.append(step)
    assert seen.told == [*expected, "end"]
    assert_same(ours, theirs)
    assert (result.num_steps, result.stopped) == (6, False)
    assert [step for step, _ in result.held_out] == evaluated


def test_it_ends_after_the_most_steps_and_evaluates_then():
    seen = Seen()
    result, pipeline = fitted(
        epochs=9, max_steps=4, evaluate=lambda one: torch.tensor(float(one.num_steps)),
        evaluate_every=3, callbacks=[seen],
    )  # fmt: skip
    assert result.num_steps == pipeline.num_steps == 4
    assert result.held_out == [(3, 3.0), (4, 4.0)]


def test_a_callback_ends_it_at_a_step_or_an_evaluation():
    seen, other = Seen(stop_at=2), Seen()
    result, pipeline = fitted(epochs=5, callbacks=[seen, other])
    assert result.stopped
    assert seen.told == other.told
    assert [step for step, _ in seen.told[:-1]] == [1, 2]
    # The minibatch that was under way has been trained on.
    assert result.num_steps == pipeline.num_steps == 3
    seen = Seen(stop_at_evaluation=3)
    result, _ = fitted(epochs=5, evaluate=HELD_OUT, callbacks=[seen])
    assert result.stopped and result.num_steps == 3


def test_early_stopping_waits_as_long_as_it_should():
    losses = iter([3.0, 2.0, 1.95, 2.5, 1.0])
    stopping = pk.EarlyStopping(patience=2, min_delta=0.1)
    result, _ = fitted(
        epochs=9, evaluate=lambda _: torch.tensor(next(losses)), callbacks=[stopping]
    )
    assert result.stopped and len(result.held_out) == 4
    assert (stopping.best, stopping.best_step, stopping.num_worse) == (2.0, 6, 2)
    nothing = pk.EarlyStopping(patience=1)
    result, _ = fitted(epochs=9, evaluate=lambda _: torch.tensor(float("nan")), callbacks=[nothing])
    assert len(result.held_out) == 1  # what is no number is no better


def test_schedulers_that_wait_for_a_metric_get_the_held_out_loss():
    options = {"lr_scheduler": lambda one: ReduceLROnPlateau(one, patience=0, factor=0.5)}
    losses = iter([1.0, 2.0, 3.0])
    _, pipeline = fitted(epochs=3, evaluate=lambda _: torch.tensor(next(losses)), options=options)
    assert {*pipeline.optimizers.learning_rates} == {0.025}
    _, pipeline = fitted(evaluate=HELD_OUT, options={"lr_scheduler": lambda one: StepLR(one, 1)})
    assert pipeline.optimizers.learning_rates == pytest.approx([1e-4] * 2)


def test_checkpoints_are_written_where_they_are_due(tmp_path):
    whole = make_mlp(0.0)
    fitted(whole, epochs=2, checkpoints=pk.Checkpoints(tmp_path, every=2), evaluate=HELD_OUT)
    again = make_mlp(0.0, seed=3)
    with pipeline_of(again, optimizer=momentum) as pipeline:
        assert pipeline.load(tmp_path / "step-00000004") == 4
        pk.fit(pipeline, (LOADER * 2)[4:], progress=False)
        assert pipeline.num_steps == 6
    assert_same(again, whole)


@pytest.mark.parametrize(
    ("loader", "options", "message"),
    [
        (LOADER[0], {}, "the loader is a single batch; give an iterable of batches"),
        (3, {}, "the loader is of type int"),
        ([], {}, "the loader gives no batch in epoch 1"),
        (iter(LOADER), {"epochs": 2}, "no batch in epoch 2; an iterator can be read only once"),
        (LOADER, {"epochs": 0}, "epochs is 0, but must be ≥ 1"),
        (LOADER, {"max_steps": 1.5}, "max_steps is 1.5, but must be a whole number"),
        (LOADER, {"evaluate_every": 0}, "evaluate_every is 0"),
        (LOADER, {"evaluate_every": 2}, "evaluate_every is 2, but there is nothing to evaluate"),
        (LOADER, {"callbacks": [pk.EarlyStopping()]}, "EarlyStopping waits for a held-out loss"),
        (LOADER, {"callbacks": [print]}, "a callback is of type builtin_function_or_method"),
        (LOADER, {"evaluate": 3}, "what to evaluate is of type int"),
        (LOADER, {"progress": "no"}, "progress is 'no'; give True or False"),
    ],
)
def test_what_cannot_be_fitted_is_refused(loader, options, message):
    with pytest.raises(InputError, match=message):
        fitted(loader=loader, **options)


def test_schedulers_that_wait_for_a_metric_are_refused_without_held_out_data():
    with pytest.raises(InputError, match=r"the schedulers wait for a held-out loss, .*evaluate="):
        fitted(options={"lr_scheduler": ReduceLROnPlateau})


def test_early_stopping_needs_a_loss():
    for arguments in ({"patience": 0}, {"min_delta": -1}, {"min_delta": "x"}):
        with pytest.raises(InputError, match=r"patience is 0|min_delta is"):
            pk.EarlyStopping(**arguments)
    with pytest.raises(InputError, match="EarlyStopping needs the held-out loss"):
        fitted(evaluate=HELD_OUT, callbacks=[pk.EarlyStopping()], options={"results": "none"})


def test_callbacks_hear_of_the_end_also_after_a_failure():
    seen = Seen()
    inputs, targets = make_batch(8)
    with pytest.raises(StageError):
        fitted(loader=[LOADER[0], (inputs[:, :3], targets)], callbacks=[seen])
    assert seen.told[-1] == "end"


class BadlyEnding(pk.Callback):
    def on_end(self, pipeline):
        raise OSError("the disk is full")


def test_all_callbacks_hear_of_the_end_and_the_first_error_stands():
    seen = Seen()
    with pytest.raises(OSError, match="the disk is full") as raised:
        fitted(callbacks=[BadlyEnding(), BadlyEnding(), seen])
    assert seen.told[-1] == "end"
    assert raised.value.__notes__ == ["Another on_end failed, too: the disk is full"]
    seen = Seen()
    with pytest.raises(InputError, match="gives no batch") as failed:
        fitted(loader=[], callbacks=[BadlyEnding(), seen])
    assert seen.told == ["end"]
    assert failed.value.__notes__ == ["on_end failed, too: the disk is full"]


def test_progress_is_a_line_now_and_then(capfd):
    fitted(evaluate=HELD_OUT, progress=True)
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.startswith("step 3: held-out loss ") and said.err.count("\n") == 1
    fitted(evaluate=HELD_OUT)
    assert capfd.readouterr().err == ""
    stream = io.StringIO()
    fitted(callbacks=[ProgressLines(every_seconds=0, file=stream)])
    assert [line.split(":")[0] for line in stream.getvalue().splitlines()] == [
        "step 2", "step 3",
    ]  # fmt: skip
    assert "loss" in stream.getvalue() and "steps/s" in stream.getvalue()


def test_a_loop_of_ones_own_may_call_the_same_callbacks():
    stopping = pk.EarlyStopping(patience=1)
    model = copy.deepcopy(make_mlp(0.0))
    with pipeline_of(model, optimizer=sgd) as pipeline:
        pipeline.step(*LOADER[0])
        assert not stopping.on_evaluate(pipeline.num_steps, torch.tensor(1.0), pipeline)
        assert stopping.on_evaluate(pipeline.num_steps, torch.tensor(1.0), pipeline)
        assert not pipeline.any_process(False) and pipeline.any_process(True)
