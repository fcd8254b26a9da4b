import numpy as np
import pytest

from penstock import Costs, Schedule, schedules
from penstock.base.errors import InputError, ScheduleError
from penstock.core.schedule.about import about
from penstock.core.schedule.lower import add_communication, forward_only


def test_torchs_csv_reads_with_idle_cells_and_prints_without():
    schedule = Schedule.parse("0F0, ,0F1,0B0,,0B1\n1F0,1B0,1F1,1B1\n")
    assert str(schedule) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert (schedule.num_ranks, schedule.num_stages, schedule.num_microbatches) == (2, 2, 2)
    assert schedule.stages_of == ((0,), (1,))


def test_an_unreadable_cell_is_named_by_line_and_column():
    with pytest.raises(ScheduleError, match="line 2, cell 3: '1G0' is not an op"):
        Schedule.parse("0F0,0B0\n1F0,,1G0")


def test_an_empty_text_is_no_schedule():
    with pytest.raises(ScheduleError, match="empty"):
        Schedule.parse("\n\n")


def test_schedules_are_equal_by_their_ops():
    built = schedules.build("1f1b", num_ranks=2, num_microbatches=2)
    assert Schedule.parse(str(built), name="from a file") == built


@pytest.mark.parametrize(
    ("name", "hint"), [("1fb1", "did you mean '1f1b'"), ("zzz", "there are gpipe, 1f1b")]
)
def test_an_unknown_family_gets_a_suggestion(name, hint):
    with pytest.raises(InputError, match=f"no schedule is called '{name}'; {hint}"):
        schedules.build(name, num_ranks=2, num_microbatches=2)


@pytest.mark.parametrize("count", ["num_ranks", "num_microbatches"])
def test_a_count_below_one_is_named(count):
    counts = {"num_ranks": 2, "num_microbatches": 2, count: 0}
    with pytest.raises(InputError, match=f"gpipe: {count} is 0"):
        schedules.build("gpipe", **counts)


def test_an_unknown_option_is_refused():
    with pytest.raises(InputError, match="zb-h1 has no option colour; it takes replicas"):
        schedules.build("zb-h1", num_ranks=2, num_microbatches=2, colour="red")


@pytest.mark.parametrize("name", schedules.names())
def test_every_family_cites_its_paper(name):
    assert "arXiv" in about(name).citation


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_ranks": "4"}, "gpipe: num_ranks is '4', but must be a whole number"),
        ({"num_ranks": 4.0}, "num_ranks is 4.0, but must be a whole number"),
        ({"num_microbatches": None}, "num_microbatches is None"),
        ({"num_microbatches": True}, "num_microbatches is True"),
        ({"num_ranks": 10**11}, "num_ranks is 100000000000, but may be 100,000,000 at most"),
        ({"num_ranks": 10**5, "num_microbatches": 10**4}, "100,000,000, which no memory holds"),
    ],
)
def test_counts_are_whole_numbers(arguments, message):
    counts = {"num_ranks": 2, "num_microbatches": 2, **arguments}
    with pytest.raises(InputError, match=message):
        schedules.build("gpipe", **counts)


def test_numpys_numbers_are_numbers():
    two = np.int64(2)
    built = schedules.build(
        "interleaved-1f1b", num_ranks=two, num_microbatches=two, stages_per_rank=two
    )
    assert built == schedules.build("interleaved-1f1b", num_ranks=2, num_microbatches=2)
    assert Costs(forward=np.float32(1.5), hop=np.array([0.5])) == Costs(1.5, hop=(0.5,))


@pytest.mark.parametrize("name", [None, ["gpipe"], 1])
def test_a_name_is_text(name):
    with pytest.raises(InputError, match="the schedule's name is of type"):
        schedules.build(name, num_ranks=2, num_microbatches=2)


def test_hops_are_the_tensors_that_cross():
    v = schedules.build("zb-v", num_ranks=3, num_microbatches=2)
    assert v.num_hops == 2 * 2 * 4  # two microbatches, there and back over four of five edges
    for name in ("1f1b", "chimera", "interleaved-zb", "seq1f1b"):
        schedule = schedules.build(name, num_ranks=4, num_microbatches=8)
        sends = [op for ops in add_communication(schedule).ranks for op in ops if "SEND" in op.kind]
        assert schedule.num_hops == add_communication(schedule).num_hops == len(sends)
    forward = forward_only(schedules.build("1f1b", num_ranks=4, num_microbatches=8))
    assert forward.num_hops == 3 * 8


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (3, "the ranks is of type int; give a list of ops for each rank"),
        ([[], 3], "rank 1 is of type int; give a list of its ops"),
    ],
)
def test_a_schedule_is_made_of_lists_of_ops(ranks, message):
    with pytest.raises(InputError, match=message):
        Schedule.of(ranks)
