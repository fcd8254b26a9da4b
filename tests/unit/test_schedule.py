import pytest

from penstock import Schedule, schedules
from penstock.errors import InputError, ScheduleError


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
    with pytest.raises(InputError, match="gpipe has no option colour; it takes no options"):
        schedules.build("gpipe", num_ranks=2, num_microbatches=2, colour="red")


@pytest.mark.parametrize("name", schedules.names())
def test_every_family_cites_its_paper(name):
    assert "arXiv" in __import__(schedules.family(name).__module__, fromlist=["_"]).__doc__
