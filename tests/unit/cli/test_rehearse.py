"""``penstock rehearse``, as a person would call it."""

from __future__ import annotations

import json

import pytest

from penstock.planning.plans import Plan, StagePlan
from tests.kit.command_line import refused, run, succeed

QUICKLY = ("-p", "2", "-m", "3", "--op-ms", "2", "--steps", "2", "--transport", "threads")


def test_a_schedule_is_rehearsed_and_compared_with_its_prediction():
    lines = run("rehearse", "zb-h1", *QUICKLY).splitlines()
    assert lines[0].split() == ["zb-h1", "predicted", "measured", "difference"]
    assert [line.split("  ")[0] for line in lines[1:4]] == ["makespan", "bubble", "stage bubble"]
    assert lines[1].rstrip().endswith("%")
    assert lines[2].rstrip().endswith("points")
    assert lines[5].startswith("steps: median of 1")
    assert lines[6].startswith("a message takes:")


def test_processes_are_the_default():
    answer = json.loads(run("rehearse", "1f1b", "-p", "2", "-m", "2", "--op-ms", "2", "--json"))
    assert answer["name"] == "1f1b"
    assert answer["num_ranks"] == 2
    assert len(answer["step_seconds"]) == 4
    assert answer["makespan"]["measured"] >= 0.98 * 3 * 3 * 0.002
    assert answer["hop_seconds"] > 0
    for name in ("makespan", "bubble", "stage_bubble"):
        assert set(answer[name]) == {"predicted", "measured", "difference"}


def test_costs_are_units_of_op_ms_for_a_whole_rank():
    answer = json.loads(run("rehearse", "zb-v", *QUICKLY, "--costs", "3,2,1,5", "--json"))
    makespan, bubble = answer["makespan"]["predicted"], answer["bubble"]["predicted"]
    assert makespan * (1 - bubble) == pytest.approx(3 * (3 + 2 + 1) * 0.002)
    scaled = json.loads(
        run("rehearse", "zb-v", *QUICKLY, "--costs", "3,2,1", "--scale", "0.5", "--json")
    )
    makespan, bubble = scaled["makespan"]["predicted"], scaled["bubble"]["predicted"]
    assert makespan * (1 - bubble) == pytest.approx(3 * (3 + 2 + 1) * 0.001)


def test_a_plan_and_a_csv_are_rehearsed_too(tmp_path):
    stages = tuple(
        StagePlan(
            layers=(str(rank),),
            rank=rank,
            forward_seconds=0.002,
            backward_input_seconds=0.001,
            backward_weight_seconds=0.001,
        )
        for rank in range(2)
    )
    Plan(model="", schedule="gpipe", num_microbatches=2, stages=stages).save(tmp_path / "plan.json")
    quickly = ("--steps", "1", "--transport", "threads", "--json")
    answer = json.loads(run("rehearse", str(tmp_path / "plan.json"), *quickly))
    assert answer["name"] == "gpipe"
    assert answer["makespan"]["measured"] >= 0.012 * 0.98
    (tmp_path / "mine.csv").write_text("0F0,0B0\n1F0,1B0\n")
    answer = json.loads(run("rehearse", str(tmp_path / "mine.csv"), "--op-ms", "2", *quickly))
    assert answer["name"] == "mine"
    assert answer["makespan"]["measured"] >= 0.012 * 0.98


@pytest.mark.parametrize("suffix", ["svg", "html", "txt"])
def test_the_picture_shows_the_prediction_above_the_measurement(suffix, tmp_path):
    path = tmp_path / f"picture.{suffix}"
    assert f"wrote {path}" in succeed("rehearse", "1f1b", *QUICKLY, "-o", str(path)).stderr
    text = path.read_text()
    assert text.index("Predicted") < text.index("Measured")


def test_what_was_found_is_a_report_that_draw_reads(tmp_path):
    path = tmp_path / "found.json"
    succeed("rehearse", "zb-h1", *QUICKLY, "-o", str(path))
    assert run("draw", path).startswith("zb-h1, measured:")
    facts = [fact["label"] for fact in json.loads(path.read_text())["facts"]]
    assert facts[:5] == ["makespan", "bubble", "stage bubble", "steps", "a message takes"]


@pytest.mark.parametrize("source", ["pipedream", "pipedream:replicas=1-1", "pipedream-2bw"])
def test_of_a_stream_the_steady_state_is_told(source):
    quickly = ("-p", "2", "-m", "8", "--op-ms", "2", "--steps", "1", "--transport", "threads")
    lines = run("rehearse", source, *quickly).splitlines()
    assert [line.split("  ")[0] for line in lines[4:6]] == ["steady seconds", "steady efficiency"]
    answer = json.loads(run("rehearse", source, *quickly, "--json"))
    assert answer["steady_seconds"]["predicted"] >= 0.006
    assert answer["steady_seconds"]["measured"] >= 0.98 * 0.006
    efficiency = answer["steady_efficiency"]
    assert efficiency["predicted"] == pytest.approx(0.006 / answer["steady_seconds"]["predicted"])


def test_microbatches_per_update_are_read_from_the_name():
    quickly = ("-p", "2", "-m", "12", "--op-ms", "1", "--steps", "1", "--transport", "threads")
    answer = json.loads(run("rehearse", "pipedream-2bw:minibatch=6", *quickly, "--json"))
    assert "steady_seconds" in answer
    answer = json.loads(run("rehearse", "pipedream-2bw:minibatch=7", *quickly, "--json"))
    assert "steady_seconds" not in answer  # the middle half of the stream is less than an update


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("1f1bb",), "did you mean '1f1b'"),
        (("nowhere.json",), "cannot read nowhere.json"),
        (("1f1b", "-o", "picture.gif"), "end the name in .svg, .pdf, .png, .html, .txt"),
        (("1f1b", "--op-ms", "0"), "--op-ms"),
        (("1f1b", "--scale", "-1"), "--scale"),
        (("1f1b", "-p", "1000"), "1000 ranks"),
        (("pipedream", "--updates", "agreed"), "pipedream never flushes"),
    ],
)
def test_what_makes_no_sense_is_one_clear_error(arguments, words):
    assert words in refused("rehearse", *arguments)
