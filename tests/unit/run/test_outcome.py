"""What the ranks of a step have, put together."""

from __future__ import annotations

import itertools
import operator
from array import array
from functools import reduce

import pytest
import torch

from penstock import Op, Timeline
from penstock.engine.run import outcome
from penstock.engine.run.drive.processes import RankReport
from penstock.engine.run.minibatch import StepResult
from penstock.engine.run.outcome import RankRecord
from penstock.engine.transport.wire import Codec


def record(*spans, **fields):
    ops, starts, ends = zip(*spans, strict=True) if spans else ((), (), ())
    ops = [Op.parse(op) for op in ops]
    return RankRecord(ops, array("d", starts), array("d", ends), **fields)


RANKS = [record(("0F0", 100, 101), ("0B0", 103, 105)), record(("1F0", 101, 102))]


def rows(ranks, offsets=(0.0, 0.0)):
    pairs = zip(ranks, offsets, strict=True)
    return [own._replace(clock_offset=offset) for own, offset in pairs]


def test_a_timeline_starts_at_the_first_op_of_any_rank():
    shown = outcome.timeline([rows(RANKS)], "1f1b")
    assert (shown.name, shown.source, shown.num_ranks) == ("1f1b", "measured", 2)
    assert [(str(s.op), s.rank, s.start, s.end) for s in shown.spans] == [
        ("0F0", 0, 0, 1), ("0B0", 0, 3, 5), ("1F0", 1, 1, 2),
    ]  # fmt: skip
    assert shown == Timeline.of(shown.spans, 2, "1f1b", "measured")


def test_times_of_other_clocks_are_moved_to_that_of_rank_0():
    ahead = [RANKS[0], record(("1F0", -399, -398))]
    moved = outcome.timeline([rows(ahead, (0.0, -500.0))], "1f1b")
    assert moved == outcome.timeline([rows(RANKS)], "1f1b")
    # Also where the other clock is the one that shows the earlier start.
    late = [RANKS[0], record(("1F0", 590, 591))]
    shown = outcome.timeline([rows(late, (0.0, 500.0))], "")
    assert [span.start for span in shown.spans] == [10, 13, 0]


def test_ranks_without_records_have_empty_rows():
    assert outcome.timeline([rows([record(), record()])], "").makespan == 0
    assert outcome.timeline([rows([record(), RANKS[0]])], "").by_rank[0] == ()


def test_minibatches_of_a_stream_follow_each_other_with_their_own_numbers_and_versions():
    first = [record(("0F0", 1, 2), ("0F1", 2, 3), versions=[0, 0])]
    second = [record(("0B0", 3, 4), ("0F0", 4, 5), versions=[0, 1], base=2)]
    shown = outcome.timeline([first, second], "pipedream")
    assert [(str(s.op), s.start, s.version) for s in shown.spans] == [
        ("0F0", 0, 0), ("0F1", 1, 0), ("0B2", 2, 0), ("0F2", 3, 1),
    ]  # fmt: skip


def test_versions_of_a_stream_are_unknown_if_those_of_a_part_are():
    first = [record(("0F0", 1, 2), versions=[0])]
    second = [record(("0B0", 3, 4))]
    assert outcome.timeline([first, second], "").rows[0].versions is None


@pytest.mark.parametrize("count", [1, 2, 7, 64])
def test_the_loss_of_a_minibatch_is_summed_in_order_to_the_bit(count):
    torch.manual_seed(count)
    losses = dict(enumerate((torch.randn(count) * 10 ** torch.randn(count)).unbind()))
    weights = torch.rand(count).double().tolist()
    one_after_the_other = reduce(operator.add, [losses[k] * weights[k] for k in range(count)])
    with torch.device("meta"):  # what the caller makes new tensors on is no concern of this
        total = outcome.weighted_sum(losses, weights)
    assert torch.equal(total, one_after_the_other)
    assert (total.dtype, total.shape, total.device.type) == (torch.float32, (), "cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_of_half_precision_are_weighted_and_summed_in_single(dtype):
    """The sum of 64 losses in bfloat16 came in steps of 1/128."""
    losses = {k: torch.tensor(1 + k / 128, dtype=dtype) for k in range(64)}
    total = outcome.weighted_sum(losses, [1 / 64] * 64)
    assert (total.dtype, total.item()) == (torch.float32, 1 + 63 / 256)


def test_losses_of_double_precision_stay_so():
    losses = {k: torch.tensor(0.1 * k, dtype=torch.float64) for k in range(5)}
    total = outcome.weighted_sum(losses, [0.3] * 5)
    assert torch.equal(total, reduce(operator.add, [losses[k] * 0.3 for k in range(5)]))


@pytest.mark.parametrize("dtypes", ["float32", "float64", "bfloat16", "float32 float64"])
@pytest.mark.parametrize("beside", [{}, {"outputs": {3: torch.ones(2)}}])
def test_losses_add_up_to_the_same_where_they_have_travelled(dtypes, beside):
    kinds = itertools.cycle(getattr(torch, name) for name in dtypes.split())
    losses = {k: torch.randn(()).to(next(kinds)) for k in (3, 1, 6)}
    report = RankReport.of(StepResult(losses=losses, **beside), records=False, results=True)
    # As between processes, which know nothing of tuples with names.
    description, tensors = Codec().describe(report.packed())
    node, _ = Codec().read(description)
    there = RankReport.unpacked(Codec().build(node, iter(tensors)))
    weights = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]
    total = outcome.weighted_sum(there.losses, weights)
    assert torch.equal(total, outcome.weighted_sum(losses, weights))
    assert total.dtype == outcome.weighted_sum(losses, weights).dtype
    assert there.outputs.keys() == report.outputs.keys()


def test_losses_as_numbers_and_others_add_up_in_the_widest_type():
    losses = {0: 0.5, 1: torch.tensor(0.1, dtype=torch.float64)}
    total = outcome.weighted_sum(losses, [0.5, 0.5])
    assert torch.equal(total, torch.tensor(0.25) + losses[1] * 0.5)
