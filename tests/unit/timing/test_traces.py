"""Traces of other engines become timelines. Those that torch's own runtime writes are read in
``tests/distributed/jobs/torch_runtime.py``."""

import gzip

import pytest

import penstock as pk
from penstock.core.timing.analysis import rank_shares
from tests.kit.traces import event, trace_file, traced

COSTS = pk.Costs(forward=1.0, backward_input=1.0, backward_weight=1.0, hop=0.25)


def assert_same(measured, timeline, start=0.0):
    ours = sorted(timeline.spans, key=lambda span: (span.rank, span.start))
    for span, other in zip(measured.spans, ours, strict=True):
        assert (span.op, span.rank) == (other.op, other.rank)
        assert span.start == pytest.approx(other.start - start, abs=1e-6)
        assert span.end == pytest.approx(other.end - start, abs=1e-6)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "interleaved-1f1b"])
@pytest.mark.parametrize("waits", [0.0, 0.125])
def test_a_profile_of_torchs_pipelines(schedule, waits, tmp_path):
    predicted = pk.simulate(pk.schedules.build(schedule, num_ranks=2, num_microbatches=4), COSTS)
    measured = pk.Timeline.from_traces(traced(predicted, tmp_path, waits=waits)[::-1])
    assert measured.source == "measured"
    assert_same(measured, predicted)
    assert measured.bubble == pytest.approx(predicted.bubble)


def test_steps_are_told_apart(tmp_path):
    predicted = pk.simulate(pk.schedules.build("1f1b", num_ranks=2, num_microbatches=2), COSTS)
    paths = traced(predicted, tmp_path, steps=3)
    for step in (0, 2, -1):
        assert_same(pk.Timeline.from_traces(paths, step), predicted)
    with pytest.raises(pk.InputError, match="step is 3, but the trace of rank 4 has 3 whole steps"):
        pk.Timeline.from_traces(paths, 3)


def test_what_draw_writes_comes_back(tmp_path):
    predicted = pk.simulate(pk.schedules.build("v-half", num_ranks=3, num_microbatches=6), COSTS)
    pk.draw(predicted, tmp_path / "drawn.json")
    assert_same(pk.Timeline.from_traces([tmp_path / "drawn.json"]), predicted)


def test_the_words_of_torchs_simple_schedules(tmp_path):
    paths = [
        trace_file(tmp_path / f"rank{rank}.json", [
            event("Forward 0", 1 + rank, 1), event("Backward 0", 5 - rank, 2),
        ])
        for rank in range(2)
    ]  # fmt: skip
    measured = pk.Timeline.from_traces(paths)
    assert [(str(span.op), span.start, span.end) for span in measured.spans] == [
        ("0F0", 0.0, 1.0), ("0B0", 4.0, 6.0), ("1F0", 1.0, 2.0), ("1B0", 3.0, 5.0),
    ]  # fmt: skip


def test_on_devices_it_is_from_the_first_kernel_to_the_last(tmp_path):
    events = [
        event("0F0", 0, 1), event("0B0", 1, 1),
        event("0F0", 2.0, 1.0, "gpu_user_annotation", 7),
        event("0F0", 2.5, 1.0, "gpu_user_annotation", 8),
        event("0B0", 4.0, 1.0, "gpu_user_annotation", 7),
    ]  # fmt: skip
    measured = pk.Timeline.from_traces([trace_file(tmp_path / "rank0.json", events)])
    assert [(span.start, span.end) for span in measured.spans] == [(0.0, 1.5), (2.0, 3.0)]


def test_hosts_whose_traces_begin_at_other_times(tmp_path):
    first = trace_file(tmp_path / "rank0.json", [event("0F0", 0, 1)], baseTimeNanoseconds=10**18)
    second = trace_file(
        tmp_path / "rank1.json", [event("1F0", 0, 1)], baseTimeNanoseconds=10**18 + 2 * 10**9
    )
    measured = pk.Timeline.from_traces([first, second])
    assert [span.start for span in measured.spans] == pytest.approx([0.0, 2.0], abs=1e-3)


def test_compressed_files(tmp_path):
    plain = trace_file(tmp_path / "rank0.json", [event("0F0", 0, 1), event("0B0", 1, 1)])
    packed = tmp_path / "rank0.json.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert pk.Timeline.from_traces([packed]).rows == pk.Timeline.from_traces([plain]).rows
    packed.write_bytes(b"nothing")
    with pytest.raises(pk.FileError, match="cannot read"):
        pk.Timeline.from_traces([packed])


def test_wrong_traces(tmp_path):
    other = trace_file(tmp_path / "rank0.json", [event("aten::mm", 0, 1)])
    with pytest.raises(pk.FileError, match="has no ops: no event is called PP:0F1"):
        pk.Timeline.from_traces([other])
    nameless = trace_file(tmp_path / "x.json", [event("0F0", 0, 1)])
    with pytest.raises(pk.FileError, match="does not say of which rank it is"):
        pk.Timeline.from_traces([nameless])
    text = tmp_path / "rank3.json"
    text.write_text("[]")
    with pytest.raises(pk.FileError, match="is no Chrome trace"):
        pk.Timeline.from_traces([text])
    one = trace_file(tmp_path / "rank1.json", [event("0F0", 0, 1)])
    with pytest.raises(pk.InputError, match="two traces are of rank 1"):
        pk.Timeline.from_traces([one, one])
    for wrong in (str(one), []):
        with pytest.raises(pk.InputError, match="give a list of the trace files"):
            pk.Timeline.from_traces(wrong)
    last = trace_file(tmp_path / "rank2.json", [event("2F0", 0, 1)])
    with pytest.raises(pk.InputError, match="show stage 2, but not 1"):
        pk.Timeline.from_traces([one, last])
    with pytest.raises(pk.InputError, match="a trace is of type int; give the path"):
        pk.Timeline.from_traces([1])


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("999999999999999F0", "show stage 999999999999999, but not 0"),
        ("0F999999999999999", "show microbatch 999999999999999, but have only 1 ops"),
        (f"0F{'9' * 5000}", "has no ops"),
    ],
)
def test_numbers_beyond_those_of_any_pipeline(name, problem, tmp_path):
    path = trace_file(tmp_path / "rank0.json", [event(name, 0, 1)])
    with pytest.raises((pk.InputError, pk.FileError), match=problem):
        pk.Timeline.from_traces([path])


def test_an_op_without_a_duration(tmp_path):
    endless = event("0F0", 0, 1)
    del endless["dur"]
    path = trace_file(tmp_path / "rank0.json", [endless])
    with pytest.raises(pk.FileError, match=r"the op 0F0 has no duration \(dur\)"):
        pk.Timeline.from_traces([path])


def test_stragglers(tmp_path):
    schedule = pk.schedules.build("1f1b", num_ranks=4, num_microbatches=8)
    usual = pk.simulate(schedule, pk.Costs(forward=[1.0, 1.0, 2.0, 1.0]))
    slow = pk.simulate(schedule, pk.Costs(forward=[1.0, 1.5, 2.0, 1.0]))
    assert [share.straggles for share in rank_shares(slow, usual)] == [False, True, False, False]
    # Without a prediction, whoever has more to do seems to straggle.
    assert [share.straggles for share in rank_shares(usual)] == [False, False, True, False]
    for share, busy in zip(rank_shares(slow, usual), slow.busy, strict=True):
        assert share.busy + share.idle == pytest.approx(slow.makespan)
        assert share.busy == busy
    other = pk.simulate(pk.schedules.build("zb-v", num_ranks=4, num_microbatches=8))
    with pytest.raises(pk.InputError, match="compare a run with the plan that it ran"):
        rank_shares(slow, other)
