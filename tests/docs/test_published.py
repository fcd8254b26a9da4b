"""``benchmarks.predicting.published``: predictions, and why some rows have none."""

import copy
import json
import sys
from pathlib import Path

import pytest

from benchmarks.predicting import published, published_ranks
from benchmarks.predicting.published_steps import NotPredictedError, setting_of

ROW = {
    "id": "vtrain-single/x", "source": "a test", "date": "2024", "device": "A100-SXM",
    "gpus": 8, "gpus_per_node": 8, "inter_link": "single node",
    "model": {"kind": "dense", "layers": 24, "hidden": 2048, "heads": 16, "kv_heads": 16,
              "ffn": 8192, "gated_mlp": False, "vocab": 50257, "seq": 1024},
    "precision": "fp16", "tp": 2, "sp": False, "cp": 1, "ep": 1, "pp": 2, "dp": 2, "zero": "0",
    "schedule": "1F1B", "chunks_per_rank": 1, "micro_batch": 4, "num_microbatches": 8,
    "global_batch": 64, "recompute": "full", "attention": "unfused",
    "measured": {"step_ms": 1000.0}, "peak_memory_gib": "unknown", "complete": "full",
}  # fmt: skip


def changed(**fields):
    return {**copy.deepcopy(ROW), **fields}


def seconds(row):
    return published.compared(row).predicted


def test_a_step_is_of_the_size_that_its_flops_make_it():
    model = ROW["model"]
    parameters = 12 * model["layers"] * model["hidden"] ** 2 + model["vocab"] * model["hidden"]
    flops = 8 * parameters * 64 * model["seq"] / 8  # with the recomputation, on each of eight
    assert flops / 312e12 / 0.65 < seconds(ROW) < flops / 312e12 / 0.25


def test_what_adds_work_takes_longer_and_what_spares_it_less():
    usual = seconds(ROW)
    assert seconds(changed(recompute="none")) < 0.85 * usual
    assert seconds(changed(num_microbatches=16)) == pytest.approx(1.8 * usual, rel=0.15)
    fused = changed(attention="flash")
    assert seconds(fused) < usual


def test_many_microbatches_are_extrapolated_as_they_would_be_simulated():
    some = [seconds(changed(num_microbatches=count)) for count in (8, 16, 24)]
    assert some[2] - some[1] == pytest.approx(some[1] - some[0], rel=1e-6)


def test_rules_decide_what_a_row_does_not_say_and_are_reported():
    assert setting_of(ROW).assumed == ()
    made = setting_of(changed(recompute="unknown", attention="unknown", date="2024"))
    assert made.assumed == ("recompute", "attention")
    assert made.recompute == "none"
    assert made.fused_attention


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"complete": "doubtful"}, "doubtful"),
        ({"micro_batch": "unknown"}, "not all known"),
        ({"device": "TRS-80"}, "the catalogue has no TRS-80"),
        ({"measured": {}}, "no step time"),
        ({"schedule": "a new one"}, "not known"),
        ({"id": "somebody/1"}, "a software that the catalogue lacks"),
    ],
)
def test_a_row_that_cannot_be_predicted_says_why(fields, said):
    with pytest.raises(NotPredictedError, match=said):
        published.compared(changed(**fields))


def test_the_table_counts_constants_first_and_names_each_source(tmp_path, monkeypatch, capsys):
    path = tmp_path / "rows.jsonl"
    rows = [ROW, changed(recompute="unknown"), changed(complete="doubtful")]
    path.write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setattr(sys, "argv", ["published", "--rows", str(path)])
    published.main()
    lines = capsys.readouterr().out.splitlines()
    assert "constants were fitted" in lines[0]
    assert any(line.startswith("vTrain, one node  ") for line in lines)
    assert any(line.startswith("vTrain, one node, by rules") for line in lines)
    assert lines[-1].split() == ["1", "doubtful,", "as", "its", "notes", "say"]


LAYOUTS = Path(__file__).parents[1] / "data" / "published_layouts.jsonl"
"""Of vTrain's runs of 3.6B parameters on 64 GPUs, and of the zero-bubble authors' of 1.5B on 8."""


@pytest.fixture(scope="module")
def cases():
    rows = [json.loads(line) for line in LAYOUTS.read_text().splitlines()]
    return published_ranks.published_cases(rows)


def test_the_best_published_layout_is_among_the_first_three(cases):
    assert max(len(case.layouts) for case in cases) == 13
    assert len(cases) == 4
    for case in cases:
        assert case.place <= published_ranks.FIRST, case.name
        assert case.regret < 0.15, case.name


def test_layouts_are_in_the_order_of_their_predictions(cases, capsys):
    for case in cases:
        predicted = [run.predicted for run in case.layouts]
        assert predicted == sorted(predicted)
        assert len({(r.setting.row["software"], r.setting.row["gpus"]) for r in case.layouts}) == 1
    published_ranks.print_cases(cases)
    printed = capsys.readouterr().out
    assert "0 cases in which the published best is not among the first three" in printed
    assert "all                              4" in printed


def test_a_layout_that_is_worse_than_predicted_is_told(cases, capsys):
    """As if the best of thirteen had been the one that is predicted to be the slowest."""
    (case,) = (case for case in cases if len(case.layouts) == 13)
    *others, last = case.layouts
    spoiled = case._replace(layouts=(*others, last._replace(measured=0.1)))
    assert spoiled.place == 13
    published_ranks.print_cases([spoiled])
    assert "is number 13 of 13; the first, tp " in capsys.readouterr().out
