"""What a stream tells of itself."""

import math
import warnings

import pytest
import torch

from penstock.training.live.intake import Intake, Result
from penstock.training.live.report import StreamLedger

COUNTS = 5, Intake(lambda: None)


def ledger_of(values, age):
    ledger = StreamLedger(age)
    for number, value in enumerate(values):
        ledger.entered(number, torch.tensor([value]))
    return ledger


def test_the_quantiles_are_those_of_the_latencies():
    ledger = StreamLedger(0)
    for number in range(100):
        ledger.told(Result(number, None, None, (99 - number) / 1000), 2.0 if number % 2 else None)
    report = ledger.report(*COUNTS)
    assert report.latency_p50_seconds == pytest.approx(0.050)
    assert report.latency_p95_seconds == pytest.approx(0.095)
    assert report.latency_p99_seconds == pytest.approx(0.099)
    assert (report.mean_loss, report.num_labelled, report.num_results) == (2.0, 50, 100)


def test_before_the_first_frame_there_is_nothing_to_tell():
    report = StreamLedger(4).report(*COUNTS)
    assert report.frames_per_second is report.mean_loss is report.latency_p50_seconds is None
    assert "not compared" in str(report)


def test_change_is_measured_over_the_age_of_a_gradient():
    # x(t) = 1.01^t changes by 1 − 1.01^−4 in four frames.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = ledger_of([1.01**t for t in range(300)], 4).report(*COUNTS)
    assert report.mean_change == pytest.approx(1 - 1.01**-4, rel=1e-3)


def test_frames_that_are_other_pictures_are_warned_of_once():
    with pytest.warns(UserWarning, match="Stash") as told:
        ledger_of([1.0, -1.0, -1.0, 1.0] * 100, 2)
    assert len(told) == 1


def test_a_policy_that_goes_through_its_own_graphs_is_not_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ledger_of([1.0, -1.0, -1.0, 1.0] * 100, 0)


def test_a_frame_that_is_no_number_spoils_nothing():
    values = [1.01**t if t != 16 else math.nan for t in range(300)]
    assert ledger_of(values, 4).report(*COUNTS).mean_change == pytest.approx(0.039, rel=1e-2)


def test_what_holds_no_numbers_is_not_compared():
    ledger = StreamLedger(2)
    for number in range(100):
        ledger.entered(number, torch.tensor([number]))
    assert ledger.report(*COUNTS).mean_change is None
