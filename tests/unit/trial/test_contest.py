"""A contest: every method trains the same steps, or its row says why not."""

from __future__ import annotations

import dataclasses
import multiprocessing
import signal
import subprocess
import sys
from pickle import PicklingError

import pytest
import torch
from msgspec.structs import replace

from penstock.base.errors import InputError
from penstock.core.cluster import Cluster, Link
from penstock.drawing.contest import ContestRecord, markdown, summary, table_rows
from penstock.planning import planner
from penstock.trial import workload as workload_module
from penstock.trial.contest import METHODS, run_contest
from penstock.trial.contest import contest as contest_module
from penstock.trial.contest.entrants import InProcesses, interrupts_held_back
from penstock.trial.contest.judging import moved_bytes, splits_nothing
from penstock.trial.contest.methods import Method
from tests.kit.helpers import make_batch, make_mlp, make_plan
from tests.kit.small_workload import workload

IN_THREADS = ("all-cores", "naive", "gpipe", "1f1b", "pipedream", "predict")


@pytest.fixture(scope="module")
def record():
    return run_contest(workload, methods=IN_THREADS, num_microbatches=4, num_steps=8)


def row_of(record, method):
    (entry,) = (entry for entry in record.entries if entry.method == method)
    return entry


def test_synchronous_methods_have_the_losses_of_one_device(record):
    for method in ("all-cores", "naive", "gpipe", "1f1b"):
        entry = row_of(record, method)
        assert entry.ran and entry.synchronous
        assert entry.difference is not None and entry.difference < 1e-6, method
    for method in ("gpipe", "1f1b"):  # the same microbatches, so the same bits
        assert row_of(record, method).difference == 0


def test_late_gradients_learn_otherwise_and_their_age_is_recorded(record):
    entry = row_of(record, "pipedream")
    assert entry.ran and not entry.synchronous and entry.difference is None
    assert entry.delay == entry.recorded_delay == 1
    assert entry.final_loss != row_of(record, "one-device").final_loss


def test_every_row_has_all_its_figures(record):
    assert [entry.method for entry in record.entries] == ["one-device", *IN_THREADS]
    for entry in record.entries:
        assert entry.ran, entry.reason
        assert entry.step_seconds > 0 and entry.predicted_seconds > 0
        assert entry.memory_bytes > 0 and entry.predicted_bytes > 0
        assert 0 <= entry.predicted_bubble < 1
        assert [point.step for point in entry.losses] == [0, 6, 8]
    assert row_of(record, "one-device").moved_bytes == 0
    # GPipe keeps every microbatch, 1F1B as many as there are ranks.
    assert row_of(record, "gpipe").memory_bytes > row_of(record, "1f1b").memory_bytes


def test_a_record_is_a_file(record, tmp_path):
    record.save(tmp_path / "contest.json")
    assert ContestRecord.load(tmp_path / "contest.json") == record
    text = markdown(record)
    assert all(entry.title in text for entry in record.entries)
    assert len(table_rows(record)) == len(record.entries)
    assert summary(record) in text


def test_a_method_that_others_disturbed_tells_how_much(monkeypatch):
    taken = iter([0.5, 0.0])  # of one device's turn, of the other's
    monkeypatch.setattr(workload_module, "share_of_others", lambda *_: next(taken))
    disturbed, quiet = run_contest(workload, methods=["whole"], num_steps=2).entries
    assert (disturbed.others, quiet.others) == (0.5, 0.0)


def failing(setting):
    raise RuntimeError("no luck")


@pytest.fixture(scope="module")
def troubled():
    """One method raises, one trains something else, one has too few devices."""
    taken = contest_module.pipelined
    by_key = {method.key: method for method in METHODS}
    entered = (
        by_key["one-device"],
        Method("unlucky", "unlucky", "", failing),
        by_key["1f1b"],
        by_key["hybrid"],
    )

    def with_another_rate(mine, plan):
        other = dataclasses.replace(
            mine, optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1)
        )
        return taken(other, plan)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(contest_module, "chosen_methods", lambda *_: entered)
        patched.setattr(contest_module, "pipelined", with_another_rate)
        return run_contest(workload, num_microbatches=2, num_steps=3)


def test_a_method_that_raises_ends_alone_with_its_reason(troubled):
    assert row_of(troubled, "unlucky").reason == "RuntimeError: no luck"
    assert row_of(troubled, "one-device").ran
    assert "did not run: RuntimeError: no luck" in markdown(troubled)


def test_too_few_devices_are_a_reason_and_the_others_go_on(troubled):
    assert "takes 4 devices" in row_of(troubled, "hybrid").reason
    assert "3 methods could not run here" in summary(troubled)


def test_a_method_that_trains_something_else_is_stopped(troubled):
    entry = row_of(troubled, "1f1b")
    assert not entry.ran and "at minibatch 1 its loss is" in entry.reason
    assert troubled.unequal == (entry,)
    assert summary(troubled).startswith("NOT what one device computes: 1F1B")


def test_an_unknown_method_is_refused():
    with pytest.raises(InputError, match="no method is called 'gpip'; there are one-device, whole"):
        run_contest(workload, methods=["gpip"])
    with pytest.raises(InputError, match="no method is called ''"):
        run_contest(workload, methods=[""])


def test_a_target_that_is_no_number_is_refused():
    with pytest.raises(InputError, match="the target is nan, but must be a finite number"):
        run_contest(workload, target=float("nan"))


def test_a_workload_that_begins_otherwise_each_time_is_refused():
    batches = [make_batch(8, seed=step) for step in range(2)]

    def unseeded():
        return dataclasses.replace(workload(), build_model=lambda: torch.nn.Linear(16, 4))

    def shuffled():
        return dataclasses.replace(workload(), batches=lambda: iter([batches.pop()]))

    with pytest.raises(InputError, match=r"build_model of the workload small gives another weight"):
        run_contest(unseeded, num_steps=1)
    with pytest.raises(InputError, match="batches of the workload small gives another first mini"):
        run_contest(shuffled, num_steps=1)


def test_bytes_moved_are_those_of_the_documents():
    plan = make_plan(make_mlp(), 2, 4)
    stages = [replace(stage, transfer_bytes=100) for stage in plan.stages]
    plan = replace(plan, stages=tuple(stages))
    assert moved_bytes(plan, None) == 2 * 4 * 100  # an output and a gradient per microbatch


def copies_of(num_bytes, reducer):
    plan = make_plan(make_mlp(), 1, 4)
    stage = replace(plan.stages[0], parameter_bytes=num_bytes)
    options = {"replicas": "3"}
    copied = replace(plan, stages=(stage,), options=options)
    return copied.with_reducer(reducer)


@pytest.mark.parametrize(
    ("reducer", "num_servers", "expected"),
    [
        ("all-reduce", 0, 2 * 2 * 600),  # 2(r−1)·M
        ("parameter-server", 1, 2 * 3 * 600),  # gradients there, weights back
        # n = 3, k = 1: D = 10, c = 240, g = 120, so each sends M + (n−2)g, the server n·c.
        ("servers", 1, 3 * (600 + 120) + 3 * 240),
    ],
)
def test_sums_move_what_the_formulas_say(reducer, num_servers, expected):
    assert moved_bytes(copies_of(600, reducer), None, num_servers) == expected


@pytest.fixture(scope="module")
def tensor_plans():
    """(graph, link, plan) of two tensor ranks on a free link and on a very slow one."""
    graph = workload().profile(4, repeats=1, ranks=0, patience_seconds=0.01)
    # Long enough that a free link makes splitting worth it, whatever was measured.
    layers = tuple(
        replace(layer, forward_seconds=1e-3, backward_input_seconds=1e-3) for layer in graph.layers
    )
    graph = replace(graph, layers=layers)
    links = (Link(), Link(bytes_per_second=1e3))
    return [
        (
            graph,
            link,
            planner.plan(
                graph,
                replace(Cluster.local(2), link=link),
                microbatches=4,
                schedule="1f1b",
                stages=1,
                tensor_ranks=2,
                recompute="never",
            ),
        )
        for link in links
    ]


def test_tensor_ranks_that_split_nothing_move_nothing_and_it_is_known(tensor_plans):
    moved = [moved_bytes(plan, graph, link=link) for graph, link, plan in tensor_plans]
    assert [splits_nothing(plan) for _, _, plan in tensor_plans] == [False, True]
    assert moved[0] > 0 and moved[1] == 0


@pytest.mark.soak
def test_ways_to_sum_run_in_processes_and_equal_one_device():
    methods = ["all-reduce", "parameter-server", "servers"]
    found = run_contest(workload, methods=methods, num_microbatches=4, num_steps=6)
    for method in methods:
        entry = row_of(found, method)
        assert entry.ran, entry.reason
        assert entry.where.startswith("2 processes")
        assert entry.difference < 1e-5


@pytest.mark.soak
def test_on_slow_links_copies_wait_for_their_sums():
    slow = Link(bytes_per_second=1e5)
    methods = ["all-reduce", "parameter-server", "1f1b"]
    found = run_contest(workload, methods=methods, num_microbatches=4, num_steps=2, link=slow)
    assert all(entry.ran for entry in found.entries), [e.reason for e in found.entries]
    one = row_of(found, "one-device")
    for method in methods:
        entry = row_of(found, method)
        # What goes over one link takes that long, and nothing hides behind compute this short.
        least = entry.moved_bytes / 4 / slow.bytes_per_second
        assert entry.step_seconds > least > one.step_seconds
    assert "links of 0.1 MB/s" in " ".join(found.notes)


def test_a_workload_that_other_processes_cannot_import_is_a_reason(tmp_path):
    def local():
        return workload()

    with pytest.raises((AttributeError, PicklingError)):
        InProcesses(local, make_plan(make_mlp(), 2, 4), 2, str(tmp_path))
    assert not multiprocessing.active_children()


def test_what_a_contest_starts_does_not_get_interrupts():
    struck = "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('lives')"
    with interrupts_held_back():
        started = subprocess.Popen([sys.executable, "-S", "-c", struck], stdout=subprocess.PIPE)
    assert started.communicate(timeout=300)[0] == b"lives\n"
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_cores_have_no_link():
    with pytest.raises(InputError, match="cores of one machine have no link"):
        run_contest(workload, stage="cores", link=Link(bytes_per_second=1e9))


@pytest.mark.soak
def test_more_devices_than_cores_are_emulated():
    found = run_contest(
        workload,
        methods=["1f1b", "hybrid", "2bw", "tensor"],
        num_devices=4,
        num_microbatches=8,
        num_steps=2,
        stage="emulated",
    )
    assert all(entry.ran for entry in found.entries), [e.reason for e in found.entries]
    assert row_of(found, "1f1b").where == "4 emulated devices, learned in threads"
    assert row_of(found, "hybrid").difference < 1e-5
