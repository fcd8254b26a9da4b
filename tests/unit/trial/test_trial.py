"""A trial trains the same on one device, and its report says so."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest
import torch.nn.functional as F

from penstock import errors
from penstock.drawing import read_report, write_report
from penstock.drawing.report_page import report_page
from penstock.planning.plans import Plan
from penstock.trial import run_trial
from tests.kit.helpers import make_mlp, make_plan
from tests.kit.small_workload import workload


@pytest.fixture(scope="session")
def measured():
    return run_trial(workload(), make_plan(make_mlp(), 2, 4), 12, evaluate_every=4)


@pytest.fixture(scope="session")
def trial(measured):
    """As if nobody else had used the machine, on which other tests run."""
    return _beside_others(measured, [0.0] * 12)


def test_the_pipeline_equals_one_device(trial):
    assert trial.largest_loss_difference == 0
    assert trial.largest_parameter_difference == 0
    facts = {fact.label: fact.value for fact in trial.facts()}
    assert facts["largest difference in loss"] == "0, equal to the bit"


def test_a_difference_would_be_seen(trial):
    other = dataclasses.replace(trial.pipeline, losses=[*trial.pipeline.losses[:-1], 7.0])
    assert dataclasses.replace(trial, pipeline=other).largest_loss_difference > 1
    changed = dataclasses.replace(trial.pipeline, model=make_mlp(seed=5))
    assert dataclasses.replace(trial, pipeline=changed).largest_parameter_difference > 0.01


def test_everybody_has_trained_the_steps_it_should(trial):
    assert len(trial.pipeline.losses) == len(trial.twins[0].losses) == 12
    # The twins with two threads are there for speed and train every other turn of five steps.
    assert [len(twin.losses) for twin in trial.twins[1:]] == [7, 7]
    assert [step for step, _ in trial.pipeline.held_out] == [1, 4, 8, 12]


def test_the_report_holds_it_all_and_is_a_file(trial, tmp_path):
    report = trial.report()
    write_report(report, tmp_path)
    assert read_report(tmp_path) == report
    assert [len(series.points) for series in report.losses] == [12, 12, 4]
    assert report.measured.timeline() == trial.measured
    assert report.predicted.timeline() == trial.predicted
    assert len(report.stages) == 2


def test_the_report_begins_with_what_came_of_it(trial):
    report = trial.report("penstock train")
    speed_up = trial.speed_up(trial.twins[0])
    assert report.headline == (
        f"2 devices trained {speed_up:.2f} times as fast as one, with the same losses and the same "
        "weights, to the bit."
    )
    fast, same, idle = report.numbers
    assert (fast.value, same.value) == (f"{speed_up:.2f}×", "to the bit")
    assert idle.value == f"{trial.measured.bubble:.1%}"
    assert Plan.from_json(report.plan_json, where="the plan") == trial.plan
    assert report.command == "penstock train"
    changed = dataclasses.replace(trial.pipeline, model=make_mlp(seed=5))
    other = dataclasses.replace(trial, pipeline=changed)
    worst = f"{other.largest_parameter_difference:.2g}"
    assert f"no weight differs by more than {worst}" in other.headline()
    assert other.main_numbers()[1].value == f"to {worst}"
    alone = dataclasses.replace(trial, twins=())
    assert alone.headline().startswith("2 devices trained 12 steps of ")
    assert len(alone.main_numbers()) == 3


def test_the_idle_time_is_split_and_the_first_op_unlike_its_prediction_named(trial):
    numbers = trial.numbers()
    for name in ("predicted", "measured"):
        timeline = getattr(trial, name)
        for idle, busy in zip(numbers[f"{name}_idle"], timeline.busy, strict=True):
            assert sum(idle.values()) == pytest.approx(timeline.makespan - busy)
    facts = {fact.label: fact for fact in trial.facts()}
    # A plan without a profile predicts that everything takes no time.
    named = facts["first op unlike its prediction"]
    assert re.fullmatch(r"\d[FB]\d on rank \d", named.value)
    assert named.value == numbers["parting"]
    assert "instead of 0" in named.note
    shares = re.findall(r"[\d.]+", facts["idle time, measured"].value)
    assert sum(map(float, shares)) == pytest.approx(100 * trial.measured.bubble, abs=0.21)


def test_batches_that_run_out_end_the_trial_early():
    three = dataclasses.replace(
        workload(), batches=lambda: itertools.islice(workload().batches(), 3)
    )
    trial = run_trial(three, make_plan(make_mlp(), 2, 4), 50, compare=False)
    assert len(trial.pipeline.losses) == 3
    assert trial.facts()[0].label == "throughput"


@pytest.mark.parametrize(
    ("changes", "steps", "message"),
    [
        ({}, 0, "steps (0)"),
        ({"batches": lambda: iter(())}, 3, "yields no minibatch"),
    ],
)
def test_impossible_trials_are_refused(changes, steps, message):
    asked = dataclasses.replace(workload(), **changes)
    with pytest.raises(errors.InputError, match=message.replace("(", r"\(").replace(")", r"\)")):
        run_trial(asked, make_plan(make_mlp(), 2, 4), steps)


def test_a_profile_needs_a_row_per_microbatch():
    with pytest.raises(errors.InputError, match="8 rows cannot be cut into 9"):
        workload().profile(9)


def test_an_error_ends_the_trial_and_its_workers():
    def broken(outputs, targets):
        raise ValueError("boom")

    asked = dataclasses.replace(workload(), loss=broken)
    with pytest.raises(errors.StageError, match="stage 1, microbatch 0, op 1F0: ValueError: boom"):
        run_trial(asked, make_plan(make_mlp(), 2, 4), 3)


def nan_if(condition):
    def loss(outputs, targets):
        return F.cross_entropy(outputs, targets) * (float("nan") if condition(outputs) else 1.0)

    return dataclasses.replace(workload(), loss=loss)


def test_a_loss_that_is_not_a_number_ends_the_trial():
    asked = nan_if(lambda outputs: True)
    with pytest.raises(errors.StageError, match="op 1F0: ArithmeticError: the loss is nan"):
        run_trial(asked, make_plan(make_mlp(), 2, 4), 2, compare=False)


def test_a_held_out_loss_that_is_not_a_number_is_reported_as_it_is():
    asked = nan_if(lambda outputs: not outputs.requires_grad)
    trial = run_trial(asked, make_plan(make_mlp(), 2, 4), 2, compare=False)
    training, held_out = trial.report().losses
    assert held_out.points[0] == (1, None) and training.points[0][1] is not None


def _beside_others(trial, shares):
    """The trial as if other programs had had these shares of the machine, turn by turn."""

    def seen(contestant):
        return dataclasses.replace(contestant, others=shares[: len(contestant.seconds)])

    return dataclasses.replace(
        trial, pipeline=seen(trial.pipeline), twins=tuple(map(seen, trial.twins))
    )


def test_no_ratio_is_told_that_others_have_measured_with(trial):
    disturbed = _beside_others(trial, [0.48] * 12)
    told = "other programs had up to 48% of the cores meanwhile"
    assert disturbed.headline() == (
        f"2 devices trained beside one (how fast says little: {told}), with the same losses and "
        "the same weights, to the bit."
    )
    timed = [fact for fact in (*disturbed.facts(), *disturbed.main_numbers()) if fact.doubtful]
    assert [fact.label.partition(" over")[0] for fact in timed] == [
        *["speed-up"] * 3, "throughput", "step time, measured", "as fast as one device",
    ]  # fmt: skip
    assert all(fact.note.startswith(told) for fact in timed)
    page = report_page(disturbed.report())
    assert page.count('<div class="card doubtful">') == len(timed)
    assert f", but {told}." in dataclasses.replace(disturbed, twins=()).headline()


def test_steps_that_others_disturbed_do_not_count_where_enough_are_left(trial):
    seconds = [9.0] * 5 + [1.0] * 7
    pipeline = dataclasses.replace(trial.pipeline, seconds=seconds)
    mixed = _beside_others(dataclasses.replace(trial, pipeline=pipeline), [0.3] * 5 + [0.0] * 7)
    assert mixed.step_seconds == 1.0
    # The twins with two threads have trained in fewer turns, and most of these were disturbed.
    doubtful = [fact.label for fact in mixed.facts() if fact.doubtful]
    assert doubtful == [f"speed-up over {twin.name}" for twin in mixed.twins[1:]]
    assert "times as fast as one" in mixed.headline()
    assert mixed.numbers()["share_of_others"][mixed.twins[1].name] == 0.3


def test_every_step_knows_what_others_had(measured):
    for contestant in (measured.pipeline, *measured.twins):
        assert len(contestant.others) == len(contestant.seconds)
        assert all(0 <= share <= 1 for share in contestant.others)
