"""Silent mistakes that other pipelines have shipped, one test each; the stories are in
REFERENCE.md, sections 7 and 8, the numbers are those of the projects' issues."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import penstock as pk
from penstock.base.errors import InputError, ModelError, ScheduleError
from penstock.core.schedule import Schedule, families
from penstock.core.schedule.check import check
from penstock.trial.reference.single_device import SingleDevice
from tests.kit.helpers import make_batch, make_mlp, make_plan, runnable_cases, runnable_families
from tests.kit.one_device import OneDevice, assert_same, assert_same_gradients, same
from tests.kit.training import pipeline_of, sgd


def pair(dropout=0.0):
    model = make_mlp(dropout, torch.float64)
    return model, copy.deepcopy(model)


BATCH = make_batch(8, torch.float64)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6])
def test_gradients_are_scaled_once_not_once_per_stage(num_ranks):
    """DeepSpeed #7773."""
    ours, theirs = pair()
    with pipeline_of(ours, num_ranks=num_ranks) as pipeline:
        pipeline.step(*BATCH)
    OneDevice(theirs, 4).step(*BATCH)
    assert_same_gradients(ours, theirs)


@pytest.mark.parametrize("recompute", ["stage", "layers"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_recomputation_draws_the_same_random_numbers_again(schedule, recompute):
    """Megatron #6858: the wrong state was restored."""
    ours, theirs = pair(dropout=0.5)
    with pipeline_of(ours, schedule, recompute=recompute) as pipeline:
        pipeline.step(*BATCH)
    SingleDevice(theirs, 4, F.cross_entropy, seed=3).step(*BATCH)
    assert_same_gradients(ours, theirs)


def test_dropout_does_not_depend_on_the_number_of_partitions():
    """pytorch #55036."""
    losses = set()
    for num_ranks in (1, 2, 3, 6):
        model, _ = pair(dropout=0.5)
        with pipeline_of(model, num_ranks=num_ranks) as pipeline:
            losses.add(pipeline.step(*BATCH).item())
    assert len(losses) == 1


def test_layers_that_do_not_divide_by_the_stages_are_all_there():
    """Megatron #1304: 30 layers over 4 stages ran 28."""
    ran = []

    class Layer(nn.Linear):
        def forward(self, value):
            ran.append(self)
            return super().forward(value)

    model = nn.Sequential(*(Layer(4, 4) for _ in range(30)))
    plan = make_plan(model, 4, 4)
    with pk.Pipeline(model, plan, loss=F.mse_loss) as pipeline:
        pipeline.step(torch.randn(4, 4), torch.zeros(4, 4))
    assert {id(layer) for layer in ran} == {id(layer) for layer in model}
    assert len(ran) == 4 * 30
    assert all(parameter.grad is not None for parameter in model.parameters())
    with pytest.raises(ModelError, match="not in the plan: 28, 29"):
        pk.Pipeline(model, make_plan(model[:28], 4, 4), loss=F.mse_loss)


@pytest.mark.parametrize("schedule", runnable_families())
def test_labels_are_those_of_the_same_rows(schedule):
    """DeepSpeed #5729: they were taken from another batch."""
    pairs = []

    def note(output, targets):
        pairs.extend(zip(output[:, 0].tolist(), targets.tolist(), strict=True))
        return output.sum()

    model = nn.Sequential(nn.Linear(1, 1, bias=False), *(nn.Identity() for _ in range(5)))
    nn.init.ones_(model[0].weight)
    rows = torch.arange(8.0)
    with pipeline_of(model, schedule, loss=note, reduction="sum") as pipeline:
        batches = [(rows[:, None] + start, rows + start) for start in (0.0, 100.0, 200.0)]
        pipeline.step(*batches[0])
        list(pipeline.steps(batches[1:]))
    assert sorted(pairs) == [(row + at, row + at) for at in (0, 100, 200) for row in range(8)]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "chimera"])
def test_tied_weights_do_not_drift_apart(schedule):
    """torch.distributed.pipelining: each stage trains a copy of its own, without a word."""
    ours, theirs = pair()
    for model in (ours, theirs):
        model[0] = nn.Linear(16, 32, dtype=torch.float64)
        model[3] = nn.Linear(32, 32, dtype=torch.float64)
        model.append(nn.Linear(4, 16, dtype=torch.float64))
        model.append(nn.Linear(16, 32, dtype=torch.float64))
        model[-1].weight = model[0].weight
    theirs.load_state_dict(ours.state_dict())
    reference = OneDevice(theirs, 4, optimizer=sgd)
    with pipeline_of(ours, schedule, optimizer=sgd) as pipeline:
        for _ in range(3):
            assert same(pipeline.step(*BATCH), reference.step(*BATCH), 1e-12)
        held = [stage.state_dict() for stage in pipeline.stages.values()]
    copies = [state[key] for state in held for key in ("0.weight", "7.weight") if key in state]
    assert len(copies) == 2
    assert torch.equal(*copies)
    assert_same(ours, theirs, 1e-12)


def test_the_clip_norm_is_summed_in_the_order_of_one_device():
    """Partial norms per stage are rounded differently, and the runs drift apart."""
    torch.manual_seed(0)
    ours = nn.Sequential(*(nn.Linear(16, 16) for _ in range(9)))
    theirs = copy.deepcopy(ours)
    reference = OneDevice(theirs, 4, optimizer=sgd, clip_norm=0.01)
    with pipeline_of(ours, num_ranks=3, optimizer=sgd, clip_norm=0.01) as pipeline:
        for seed in range(8):
            batch = make_batch(8, seed=seed)
            pipeline.step(*batch)
            reference.step(*batch)
            assert torch.equal(pipeline.grad_norm, reference.norm)
    assert_same(ours, theirs)


def test_tensors_are_not_cut_to_the_shape_of_the_first_batch():
    """DeepSpeed #3195; torch's pipelining aborts the process."""
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    theirs = copy.deepcopy(ours)
    reference = OneDevice(theirs, 4, F.mse_loss, sgd)
    with pipeline_of(ours, loss=F.mse_loss, optimizer=sgd) as pipeline:
        for rows, length in ((4, 2), (4, 90), (40, 90), (5, 1)):
            batch = torch.randn(rows, length, 4), torch.ones(rows, length, 4)
            assert torch.equal(pipeline.step(*batch), reference.step(*batch))
    assert_same(ours, theirs)


def test_a_loss_that_is_not_told_is_none():
    """torchtitan #1232: −1 on ranks that do not hold it. (For processes, see tests/distributed.)"""
    model, _ = pair()
    with pipeline_of(model, results="none") as pipeline:
        assert pipeline.step(*BATCH) is None
        assert list(pipeline.steps([BATCH])) == [None]


def test_a_loader_that_ends_or_fails_hangs_nobody():
    """DeepSpeed #5593: it was exhausted on the stages in the middle."""

    def failing():
        yield BATCH
        yield BATCH
        raise OSError("disk gone")

    model, _ = pair()
    with pipeline_of(model, num_ranks=3, optimizer=sgd) as pipeline:
        assert len(list(pipeline.steps(iter([BATCH])))) == 1
        with pytest.raises(OSError, match="disk gone"):
            list(pipeline.steps(failing()))
        assert pipeline.step(*BATCH).isfinite()


def test_no_layer_sees_memory_that_is_no_data():
    """torch's shape inference runs layers on uninitialised memory: statistics of batch norm are
    destroyed, and one batch too many is counted."""
    seen = []
    model = nn.Sequential(nn.Linear(16, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).double()
    model[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].clone()))
    with pipeline_of(model, num_ranks=3) as pipeline:
        assert not seen
        pipeline.step(*BATCH)
    assert torch.equal(torch.cat(seen), BATCH[0])
    assert model[1].num_batches_tracked == 4


@pytest.mark.parametrize("rows", [1, 2, 5, 7, 13])
def test_rows_that_do_not_divide_by_the_microbatches_are_evaluated_right(rows):
    """torch returns rows of garbage, without an error."""
    model, _ = pair()
    inputs = make_batch(rows, torch.float64)[0]
    with pipeline_of(model, num_ranks=3) as pipeline:
        outputs = pipeline.evaluate(inputs)
    torch.testing.assert_close(outputs, model(inputs).detach(), rtol=1e-12, atol=1e-12)


def test_fewer_microbatches_than_ranks_are_no_reason_to_refuse():
    """torch refuses m < p."""
    cases = [(name, p, m) for name, p, m in runnable_cases((3, 4), range(1, 4)) if m < p]
    assert {"1f1b", "gpipe", "zb-h1"} <= {name for name, _, _ in cases}
    for name, num_ranks, num_microbatches in cases:
        ours, theirs = pair()
        with pipeline_of(ours, name, num_ranks, num_microbatches) as pipeline:
            pipeline.step(*BATCH)
        OneDevice(theirs, num_microbatches).step(*BATCH)
        assert_same_gradients(ours, theirs, 1e-12 if name == "chimera" else 0.0)


@pytest.mark.parametrize("name", runnable_families())
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_what_runs_passes_its_own_validator(name, num_ranks):
    """torch's own 1F1B order is off by one on the last rank and fails torch's validator."""
    check(families.build(name, num_ranks=num_ranks, num_microbatches=2 * num_ranks))


@pytest.mark.parametrize("text", ["0F1xyz", "0F", "F1", "0F1 0B1x", "0FF1", "-1F0"])
def test_text_that_only_begins_like_an_op_is_refused(text):
    """torch parses ``0F1xyz`` as ``0F1``."""
    with pytest.raises(ScheduleError):
        Schedule.parse(text + "\n")


def test_a_loss_keeps_neither_its_graph_nor_more_than_one_number():
    """``F.mse_loss`` gives a scalar that keeps a full-size storage alive, and torch keeps the
    losses with their graphs to the end of the step."""
    graphs = []

    def loss(output, targets):
        graphs.append(StorageWeakRef(output.untyped_storage()))
        return F.mse_loss(output, targets)

    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 256), nn.Tanh())
    with pipeline_of(model, "1f1b", num_microbatches=6, loss=loss) as pipeline:
        alive = []
        model[1].register_full_backward_hook(
            lambda *_: alive.append(sum(not one.expired() for one in graphs))
        )
        found = pipeline.step(torch.randn(12, 16), torch.zeros(12, 256))
    assert found.untyped_storage().nbytes() == found.element_size()
    assert not found.requires_grad
    # Outputs of microbatches whose backward is done are gone; of the others few are there yet.
    assert max(alive) <= 3
    assert all(one.expired() for one in graphs)


def test_receives_are_not_front_loaded():
    """torch posts m receive buffers whatever the schedule: memory grows with m."""
    model, _ = pair()
    with pipeline_of(model, "1f1b", num_microbatches=8) as pipeline:
        pipeline.step(*BATCH)
        spans = pipeline.timeline.by_rank[1]
    order = [str(span.op) for span in spans if span.op.kind.name in ("RECV_FORWARD", "FORWARD")]
    assert order == [f"1{kind}{k}" for k in range(8) for kind in ("RECV_F", "F")]


def test_a_half_of_a_minibatch_is_refused_not_trained():
    """Inputs and targets of different lengths were zipped, and rows silently dropped."""
    model, _ = pair()
    with (
        pipeline_of(model) as pipeline,
        pytest.raises(InputError, match="inputs have 8 rows, but targets have 7"),
    ):
        pipeline.step(BATCH[0], BATCH[1][:7])
