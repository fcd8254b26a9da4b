"""docs/lectures-results.md is what ``benchmarks.lectures`` says, and what docs/lectures.md tells to
run does run."""

import re
import shlex

import pytest
import torch

import penstock as pk
from benchmarks.learning.accuracy import reached
from benchmarks.learning.runs import Run, Setting
from benchmarks.lectures import measured, streams, sums, transformers
from benchmarks.lectures.__main__ import PAGE, sections_of
from benchmarks.lectures.answer import Answer, never_falls, shown
from benchmarks.lectures.answers import PARTS
from benchmarks.lectures.claims import SPEED_UPS
from benchmarks.lectures.gpipe import transformer_table
from benchmarks.lectures.transformers import Sizes, estimated
from penstock.demo import GPT, loss
from penstock.trial.contest import chosen_methods
from tests.docs.pages import Block, run_command
from tests.kit.paths import ROOT

HANDS_ON = "docs/lectures.md"


def page_commands():
    """Commands of Penstock in the page's tables, each once."""
    lines = (ROOT / HANDS_ON).read_text().splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith("| ") and "`penstock" in line]
    cells = [row[2] for row in rows if len(row) == 4]
    found = [command for cell in cells for command in re.findall(r"`(penstock [^`]+)`", cell)]
    return [*dict.fromkeys(found)]


def contests():
    """Words of the page's contests, of which ``QUICK`` replaces the methods and steps."""
    return [words for own in page_commands() if (words := shlex.split(own))[1] == "contest"]


def cases():
    """Commands that differ in what they do when they are made quick."""
    quick = {}
    for command in page_commands():
        if " contest " in command:  # whatever its picture is called
            quick.setdefault(re.sub(r"(--methods|--steps|-o) \S+", "", command), command)
        else:
            quick[command] = command
    return [*quick.values()]


@pytest.mark.usefixtures("small_demo", "rehearsed_in_threads")
@pytest.mark.parametrize("command", cases())
def test_the_command_of_a_slide_runs(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for shared in ("tests", "docs"):
        (tmp_path / shared).symlink_to(ROOT / shared)
    run_command(Block(HANDS_ON, 0, "console", command, ""), command, "")
    for picture in re.findall(r"(?:-o|--scatter) (\S+)", command):
        assert (tmp_path / picture).stat().st_size > 0


def test_contests_of_slides_are_between_methods_that_there_are():
    for words in contests():
        methods = words[words.index("--methods") + 1].split(",")
        devices = int(words[words.index("-p") + 1]) if "-p" in words else 2
        assert {own.key for own in chosen_methods(methods, devices)} >= {*methods}, words


def test_every_slide_with_a_figure_has_a_command_and_a_result():
    text = (ROOT / HANDS_ON).read_text()
    results = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles()}
    assert len(page_commands()) > 40
    linked = set(re.findall(r"lectures-results\.md#([\w-]+)", text))
    assert linked <= results
    assert len(linked) >= len(PARTS)
    for row in (line for line in text.splitlines() if line.count(" | ") == 3 and "`" in line):
        *_, command, place = row.split(" | ")
        drawn = re.findall(r"`([\w-]+\.svg)`", place)
        assert drawn or ".md" in place or ".svg)" in place
        assert all(f" {picture}" in command for picture in drawn)


def titles():
    return [line[3:] for line in PAGE.read_text().splitlines() if line.startswith("## ")]


def test_the_page_has_every_part():
    text = PAGE.read_text()
    assert titles() == [*PARTS, "Time to accuracy, on two small tasks", "Not here"]
    for row in SPEED_UPS:
        assert f"{row.model}, {row.hosts}×{row.devices}" in text


def test_a_page_is_its_sections():
    text = PAGE.read_text()
    sections = sections_of(text)
    assert [*sections] == titles()
    assert text.endswith("".join(sections.values()))


def test_its_rows_are_todays_predictions():
    text = PAGE.read_text()
    for row in shown([*transformer_table(), sums.exchange_alone()]):
        assert f"| {' | '.join(row)} |" in text


def test_a_stream_is_as_fast_as_its_host_issues_kernels():
    small = streams.stream_speed_up(10, 16, 5, 32)
    # A graph that is replayed does not wait for the host; small pictures do.
    assert all(eager <= replayed for eager, replayed in zip(*small, strict=True))
    assert small.eager[-1] < small.replayed[-1]


def test_a_transformer_of_equal_blocks_is_estimated_as_if_each_were(monkeypatch):
    sizes = 2, 32  # of microbatches; each takes a second
    monkeypatch.setattr(transformers, "MICROBATCH_ROWS", sizes)
    short = estimated(Sizes(64, 4, 2), torch.optim.SGD, torch.float16)
    with torch.device("meta"):
        model = GPT(vocabulary=51200, width=64, heads=2, layers=4, context=512).half()
        tokens = torch.empty(sizes[-1], 512, dtype=torch.long)
    whole = pk.estimate(
        model, tokens, targets=tokens, loss=loss, device="v100-sxm2", attention="formula",
        sizes=sizes[:-1], optimizer=torch.optim.SGD,
    )  # fmt: skip
    assert len(whole.other_sizes) == 1
    for ours, theirs in zip((short, *short.other_sizes), (whole, *whole.other_sizes), strict=True):
        for own, other in zip(ours.layers, theirs.layers, strict=True):
            assert own.forward_seconds == pytest.approx(other.forward_seconds)
            assert own.backward_seconds == pytest.approx(other.backward_seconds)
            assert own.activation_bytes == other.activation_bytes
            assert own.parameter_bytes == other.parameter_bytes


def test_a_row_says_what_was_missed():
    assert Answer("a", "b", "c", holds=False).cells[3] == "**missed**"
    assert Answer("a", "b", "c", ratio=0.5, holds=False).cells[3] == "0.50"
    assert never_falls([1.0, 0.995, 2.0])
    assert not never_falls([1.0, 0.9])


def test_figures_are_read_from_what_was_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    measured._kept.cache_clear()
    measured.servers_measured.cache_clear()
    try:
        assert measured.figure("2BW over GPipe") == measured.NOT_YET
        assert measured.stream_curve("30 layers", "64", "eager") == measured.NOT_YET
        assert measured.servers_measured() == measured.NOT_YET
        assert measured.NOT_YET.capitalize() in measured.accuracy_section()
        measured._kept.cache_clear()
        measured.servers_measured.cache_clear()
        (tmp_path / "lectures.txt").write_text(
            "| effect | measured here |\n| 2BW over GPipe | 2× |\n"
        )
        (tmp_path / "network.reducers.txt").write_text(
            "    100 4,2     96.6%   1.242s   1.000s  1.096  1.500s      5.55\n"
        )
        (tmp_path / "streaming.speed_up.txt").write_text(
            "| network | pixels | launch | N | emulated | measured |\n|---|--:|---|--:|--:|--:|\n"
            "| 30 layers | 64 | eager | 2 | 1.90 | 1.70 |\n"
            "| 30 layers | 64 | replayed | 2 |  | 2.10 |\n"
            "| 30 layers | 64 |  | 4 | 3.50 |  |\n"
        )
        assert measured.figure("2BW over GPipe") == "2×"
        assert measured.servers_measured() == "the exchange: 1.50× (k = 2)"
        assert measured.stream_curve("30 layers", "64", "eager") == (
            "64 px: 2 cores 1.70×; emulated 1.90× 3.50×"
        )
        replayed = measured.stream_curve("30 layers", "64", "replayed")
        assert replayed == "64 px: 2 cores 2.10×"
    finally:
        measured._kept.cache_clear()
        measured.servers_measured.cache_clear()


def test_a_target_is_reached_when_two_looks_on_end_are_as_low():
    setting = Setting("cnn", "stash", 4, 0.1, 0, 80, 20)
    assert reached(Run(setting, (2.0, 0.4, 0.6, 0.5, 0.4), 1.0, 1.0), 0.5) == 60
    assert reached(Run(setting, (2.0, 0.4, 0.6, 0.5, 0.6), 1.0, 1.0), 0.5) is None
