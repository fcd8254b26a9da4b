"""What is printed fits a window of 80 columns, and grows with a wider one."""

from __future__ import annotations

import re
from functools import cache

import click
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from penstock.cli import penstock as program
from penstock.cli import show
from penstock.planning.plans import Plan
from tests.kit.paths import DOCS, ROOT

pytestmark = pytest.mark.xdist_group("terminal")  # they look at the same plans

PLAN = DOCS / "images" / "plan.json"
GRAPH = ROOT / "tests" / "data" / "pipedream" / "vgg16" / "graph.txt"
FLEET = DOCS / "images" / "fleet.toml"


@cache
def printed(*words, columns=80):
    result = CliRunner(env={"COLUMNS": str(columns)}).invoke(
        program, [*map(str, words)], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return result.stdout


def widest(text):
    return max(map(len, text.splitlines()))


PRINTING = [
    ("draw", "1f1b"),
    ("draw", "1f1b", "-p", 4, "-m", 32),
    ("draw", "interleaved-1f1b", "-p", 4, "-m", 8),
    ("draw", "pipedream", "-p", 4, "-m", 12, "--versions"),
    ("draw", "zb-h1", "-p", 12, "-m", 24),
    ("draw", PLAN),
    ("simulate", PLAN),
    ("simulate", "partime", "--arrivals", 0.3),
    ("compare", "gpipe", "1f1b", "zb-h1", "interleaved-1f1b"),
    ("check", "zb-v"),
    ("schedules",),
    ("schedules", "zb-h1"),
    ("schedules", "dualpipe-v"),
    ("explain", PLAN, "--learning-rate", 0.1, "--curvature", 20),
    ("cluster", ROOT / "examples" / "cluster.toml"),
    ("fleet", FLEET, "--simulate"),
    ("plan", GRAPH, "-p", 4, "-m", 8),
    ("plan", GRAPH, "-p", 4, "-m", 8, "-v"),
    ("plan", GRAPH, "-p", 2, "-m", 8, "--what-if", "microbatches*2"),
    ("explain", PLAN),
    ("rehearse", "1f1b", "-p", 2, "-m", 2, "--op-ms", 0.1, "--steps", 2),
]


@pytest.mark.parametrize("words", PRINTING, ids=lambda words: " ".join(map(str, words[:2]))[-40:])
def test_it_fits_80_columns(words):
    assert widest(printed(*words)) <= 80


@pytest.mark.parametrize("name", ["zb-auto", "pipedream-2bw", "spilled", "chimera"])
def test_so_does_what_schedules_say_of_themselves(name):
    lines = printed("schedules", name).splitlines()
    assert [line for line in lines if len(line) > 80 and "= {" not in line] == []


@pytest.mark.parametrize(
    "words", [("draw", PLAN), ("plan", GRAPH, "-p", 4, "-m", 8), ("fleet", FLEET, "--simulate")]
)
def test_it_grows_with_the_window(words):
    narrow, wide = (printed(*words, columns=columns) for columns in (80, 160))
    assert widest(narrow) <= 80 < widest(wide) <= 160
    assert len(wide.splitlines()) <= len(narrow.splitlines())


def test_a_window_that_is_too_narrow_is_taken_for_one_of_80():
    assert printed("draw", "1f1b", columns=20) == printed("draw", "1f1b")


def test_a_drawing_goes_on_below_and_loses_nothing():
    whole = printed("draw", "1f1b", "-p", 4, "-m", 16, columns=200)
    bands = printed("draw", "1f1b", "-p", 4, "-m", 16).split("\n\n")
    assert len(bands) == 3 and "peak 4" in bands[2] and "peak" not in bands[0] + bands[1]
    for rank in range(4):
        row = re.search(rf"^rank {rank} │(.*)│ peak", whole, re.M)[1]
        parts = [re.search(rf"^rank {rank}│(.*)│", band, re.M)[1] for band in bands]
        assert "".join(parts) == row
        assert all(part[:1] in "FBU·─" for part in parts)


def test_ranks_have_one_name_in_any_window():
    """They were r0 where the window was narrow, and rank 0 elsewhere."""
    for words in (("1f1b", "-p", 4, "-m", 8), ("zb-h1", "-p", 12, "-m", 24)):
        for columns in (80, 200):
            told = printed("draw", *words, columns=columns)
            assert widest(told) <= columns
            assert re.findall(r"^rank \d+ *│", told, re.M) and not re.search(r"^r\d", told, re.M)
    # The first drawing that people see needs no second band.
    assert printed("draw", "1f1b", "-p", 4, "-m", 8).count("rank 0") == 1


@pytest.mark.parametrize("words", [("schedules",), ("schedules", "zb-h1"), ("explain", PLAN)])
def test_no_line_ends_in_blanks(words):
    assert not re.search(" $", printed(*words), re.M)


def test_a_name_is_never_broken_in_the_middle():
    """`explain` broke the names of layers where the column ended."""
    name = "transformer.h.0.attention.out_projection"
    rows = [("0", f"2: embedding … {name}", "1.000 KiB", "12345678", "12345678", "12345678")]
    told = _shown(show.print_table, ("stage", "layers", "a", "b", "c", "d"), rows, 2)
    assert name in told and "2: embedding …" in told
    assert widest(told) <= 80
    assert told.count("12345678") == 3 and told.count("stage") == 2


def test_columns_without_room_stand_below_with_the_names_again():
    names = ("name", *(f"n{number}" for number in range(12)))
    rows = [("first", *["1234567"] * 12), ("second", *["7654321"] * 12)]
    told = _table(names, rows)
    assert widest(told) <= 80
    assert told.count("first") == told.count("second") == told.count("name") == 2
    assert told.count("1234567") == 12


def test_no_column_is_cut_off_where_names_of_several_must_break():
    names = ["schedule", "makespan", "bubble", "stage bubble", "peak activations", "in bytes",
             "hops", "weight copies"]  # fmt: skip
    shown = _table(names, [["1f1b", "0.24", "0.00%", "0.00%", "1", "3.91 KiB", "0", "2"]])
    assert widest(shown) <= 80
    assert shown.split("\n")[-2].split()[-3:] == ["KiB", "0", "2"]
    assert "weight" in shown and "copies" in shown


def test_a_long_name_stays_in_one_piece_where_programs_read():
    name = "blocks." * 20
    told = _table(("layer", "ms"), [(name, "1.000")])
    assert name in told and "1.000" in told


def _table(names, rows):
    return _shown(show.print_table, names, rows)


def _shown(function, *arguments):
    @click.command()
    def verb():
        function(*arguments)

    return CliRunner(env={"COLUMNS": "80"}).invoke(verb, catch_exceptions=False).stdout


def test_warnings_wrap_under_their_mark():
    words = "the clock of this machine goes at another speed each time that somebody looks at it"
    plan = replace(Plan.load(PLAN), warnings=(f"{words}, so profile again",))
    warned = plan.text(80)
    first, second = warned[warned.index("! the clock") :].splitlines()
    assert len(first) <= 80 and re.match("  [a-z]", second)
    assert f"{first} {second.strip()}" == f"! {words}, so profile again"
    assert _shown(show.warn, plan.warnings[0]) == f"{first}\n{second}\n"


def test_details_come_on_request():
    brief, full = (printed("plan", GRAPH, "-p", 4, "-m", 8, *more) for more in ((), ("-v",)))
    assert "gradients" not in brief and "gradients" in full
    assert "memory" in brief
    # A wide window has room for them in any case only where they were asked for.
    wide = printed("plan", GRAPH, "-p", 4, "-m", 8, columns=160)
    assert "gradients" not in wide


def test_numbers_say_under_which_costs_they_hold(tmp_path):
    told = printed("compare", "chimera", "1f1b", "-p", 8, "-m", 32)
    assert "costs (--costs): F 1, I 1, W 1, hop 0\n" in told
    (tmp_path / "costs.json").write_text('{"forward": [1, 2]}')
    words = ("simulate", "1f1b", "-p", 2, "--costs", tmp_path / "costs.json")
    assert "F 1/2, I 1" in printed(*words)
    assert "costs (" not in printed("simulate", PLAN)
