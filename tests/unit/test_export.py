"""To torch and back: torch's own validator, lowering and simulator judge our orders; torch's own
orders, dumped as CSV, are read, checked, drawn and compared with ours."""

import csv
import inspect
import io
import re
from collections import defaultdict

import pytest
from torch.distributed.pipelining import schedules as theirs
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from penstock import Schedule, check, draw, schedules, simulate
from penstock.base.errors import InputError, ScheduleError
from penstock.core.schedule.lower import add_communication
from penstock.planning.handover import from_torch_csv, to_torch_csv
from tests.kit.helpers import compute_only
from tests.kit.torch_judges import (
    loaded_by_torch,
    lower_with_torch,
    simulate_with_torch,
    to_torch,
    validate_with_torch,
)

FIXED = [name for name in schedules.names() if name not in schedules.SEARCHED]
INEXPRESSIBLE = {"chimera", "seq1f1b"}
"""torch has no word for a stage on two ranks, nor for slices of a microbatch."""
SAME = {
    "GPipe": "gpipe",
    "Interleaved1F1B": "interleaved-1f1b",
    "LoopedBFS": "breadth-first",
    "InterleavedZeroBubble": "interleaved-zb",
    "ZBVZeroBubble": "zb-v",
    "DualPipeV": "dualpipe-v",
}
SENDS_ARE_WAITED_FOR = hasattr(theirs, "WAIT_SEND_F")
"""Since torch 2.15, whose lowered form says where."""
sizes = pytest.mark.parametrize(("p", "m"), [(2, 4), (2, 8), (4, 4), (4, 8)])


def ours(name, p, m):
    try:
        return schedules.build(name, num_ranks=p, num_microbatches=m)
    except InputError as error:
        pytest.skip(str(error))


def csv_of(rows):
    file = io.StringIO(newline="")
    csv.writer(file).writerows(rows)
    return file.getvalue()


def torchs(name, p, m, **options):
    """What torch's ``_dump_csv`` writes for one of its schedules."""
    try:
        return csv_of(get_schedule_ops(name, p, m, **options))
    except ValueError as error:
        pytest.skip(str(error))


@sizes
@pytest.mark.parametrize("name", [name for name in FIXED if name not in INEXPRESSIBLE])
def test_torch_accepts_every_family_that_it_has_words_for(name, p, m):
    schedule = ours(name, p, m)
    places = validate_with_torch(schedule)
    assert places == {op.stage: rank for op, rank in schedule.where.items()}
    lowered = lower_with_torch(schedule)
    ran = simulate_with_torch(schedule)
    for rank, ops in enumerate(add_communication(schedule).ranks):
        expected = sorted(map(str, ops))
        assert sorted(map(str, lowered[rank])) == expected
        assert sorted(str(action) for action in ran[rank] if action is not None) == expected


@sizes
@pytest.mark.parametrize("name", [name for name in FIXED if name not in INEXPRESSIBLE])
def test_what_torch_lowers_comes_back(name, p, m):
    schedule = ours(name, p, m)
    back = from_torch_csv(csv_of(lower_with_torch(schedule).values()))
    assert back == add_communication(schedule)
    assert from_torch_csv(csv_of(to_torch(schedule).values())) == schedule


def messages_between(text):
    """(what each rank sends to each other one, what that takes from it), in their orders and by the
    names of the receives."""
    rows = [row.split(",") for row in text.splitlines()]
    forwards = [
        (re.match(r"(\d+)F\d", cell), rank) for rank, row in enumerate(rows) for cell in row
    ]
    home = {match[1]: rank for match, rank in forwards if match}
    sent, taken = defaultdict(list), defaultdict(list)
    for rank, row in enumerate(rows):
        for cell in row:
            if match := re.fullmatch(r"(\d+)(SEND|RECV)_([FB])(\d+)", cell):
                stage, way, kind, microbatch = match.groups()
                further = 1 if (kind == "F") == (way == "SEND") else -1
                other = str(int(stage) + further)
                if way == "SEND":
                    sent[rank, home[other]].append(f"{other}RECV_{kind}{microbatch}")
                else:
                    taken[home[other], rank].append(cell)
    return sent, taken


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8)])
@pytest.mark.parametrize("name", [name for name in FIXED if name not in INEXPRESSIBLE])
def test_torchs_own_loader_reads_what_is_written_for_it(name, p, m, tmp_path):
    schedule = ours(name, p, m)
    path = tmp_path / "schedule.csv"
    path.write_text(to_torch_csv(schedule))
    performed = loaded_by_torch(path, schedule, "compute_only")
    assert compute_only(from_torch_csv(csv_of(performed.values()))) == schedule

    lowered = to_torch_csv(schedule, messages=True)
    if not SENDS_ARE_WAITED_FOR:
        path.write_text(lowered)
        performed = loaded_by_torch(path, schedule, "compute_comms")
        assert csv_of(performed.values()).splitlines() == lowered.splitlines()
    assert from_torch_csv(lowered) == add_communication(schedule)
    sent, taken = messages_between(lowered)  # torch's messages have no names
    assert sent == taken


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("chimera", "stage 0 is on 2 ranks, for which torch has no words"),
        ("seq1f1b", r"torch has no word for 0F0\.1"),
    ],
)
def test_what_torch_has_no_words_for_is_not_written(name, message):
    with pytest.raises(ScheduleError, match=message):
        to_torch_csv(schedules.build(name, num_ranks=4, num_microbatches=8))
    with pytest.raises(ScheduleError, match="torch has no word for 0SEND_F0"):
        to_torch_csv(add_communication(schedules.build("1f1b", num_ranks=2, num_microbatches=2)))


@sizes
@pytest.mark.parametrize("name", SAME)
def test_torchs_orders_are_read_checked_drawn_and_as_fast_as_ours(name, p, m):
    text = torchs(name, p, m)
    schedule = from_torch_csv(text, name)
    check(schedule)
    timeline = simulate(schedule)
    assert draw(timeline).startswith(f"{name}, predicted: makespan")
    assert timeline.makespan == simulate(ours(SAME[name], p, m)).makespan


@sizes
@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize("name", [name for name in SAME if name != "GPipe"])
def test_torchs_lowered_orders_are_read_with_their_messages(name, defer, p, m):
    if defer and "defer_pp_recv" not in inspect.signature(get_schedule_ops).parameters:
        pytest.skip("this torch does not defer receives")
    text = torchs(name, p, m, with_comms=True, **({"defer_pp_recv": True} if defer else {}))
    assert "UNSHARD" in text and "REDUCE_GRAD" in text
    lowered, computed = from_torch_csv(text), from_torch_csv(torchs(name, p, m))
    assert compute_only(lowered) == computed
    if "OVERLAP_F_B" in text:
        # The messages of a pair stand behind both of its ops, and so come later.
        assert simulate(lowered).makespan >= simulate(computed).makespan
    else:
        assert lowered == add_communication(computed)


def test_waits_for_what_was_sent_or_is_reduced_are_left_out():
    rows = ["0F0", "0SEND_F0", "0RECV_B0", "0B0"], ["1RECV_F0", "1F0", "1B0", "1SEND_B0"]
    waits = ["0WAIT_SEND_F0", "0WAIT_REDUCE_GRAD"], ["1WAIT_SEND_B0", "1WAIT_REDUCE_GRAD"]
    with_waits = [[*row, *added] for row, added in zip(rows, waits, strict=True)]
    assert from_torch_csv(csv_of(with_waits)) == from_torch_csv(csv_of(rows))


@sizes
def test_torchs_own_1f1b_is_refused_by_both(p, m):
    """It counts the last rank's forwards from 1 (REFERENCE §8)."""
    rows = get_schedule_ops("1F1B", p, m)
    actions = dict(enumerate(map(list, rows)))
    with pytest.raises(AssertionError, match=f"stage {p - 1}, microbatch 0 without first running"):
        theirs._validate_schedule(actions, p, p, m)
    with pytest.raises(ScheduleError, match=f"0F{m}.* missing"):
        from_torch_csv(csv_of(rows))
    validate_with_torch(schedules.build("1f1b", num_ranks=p, num_microbatches=m))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0F1xyz,0B0", "line 1, cell 2: '0F1xyz' is not an op"),
        ("0F0,0B0\n1F0,1B", "line 2, cell 2: '1B' is not an op"),
        ("0F0,0B0,0UNSHARD1", "'0UNSHARD1' is not an op"),
        ("0F0,0B0,0REDUCE_GRAD0", "'0REDUCE_GRAD0' is not an op"),
        ("0F0,0REDUCE_GRAD,0B0", "0B0 stands behind 0REDUCE_GRAD, which ends its stage"),
        ("0F0,0F0.1,0B0", "0F0.1 is one of our ops"),
        ("0F0,0B0,0FREE0", "0FREE0 is one of our ops"),
        ("0F0,(0F1;0W0)OVERLAP_F_B", "is not one F and one B"),
        ("0F0,(0F1;0B0)OVERLAP", "is not an op"),
        ("0F0,0F1,0B0", "0B1 missing"),
        ("0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1RECV_F0,1B0,1SEND_B0", "deadlock"),
        (",,\n", "empty"),
    ],
)
def test_torchs_csv_is_read_strictly(text, message):
    with pytest.raises(ScheduleError, match=message):
        from_torch_csv(text)


def test_torch_itself_reads_carelessly():
    """Why ours is another parser; when this fails, say so in the docs."""
    assert str(theirs._Action.from_str("0F1xyz")) == "0F1"


def test_an_overlapped_pair_becomes_its_forward_and_its_backward():
    schedule = from_torch_csv("0F0,(0F1;0B0)OVERLAP_F_B,,0B1,0REDUCE_GRAD\n", name="pairs")
    assert schedule == Schedule.parse("0F0,0F1,0B0,0B1")
    assert schedule.name == "pairs"
