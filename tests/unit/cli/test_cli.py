"""Every verb, as a person would call it."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from penstock import schedules, simulate
from penstock.cli import main
from penstock.core.schedule import families
from penstock.planning.plans import Plan, StagePlan
from tests.kit.command_line import refused, run


def test_schedules_lists_every_family_with_its_paper():
    listed = json.loads(run("schedules", "--json"))
    assert [row["name"] for row in listed] == list(schedules.names())
    assert all(row["law"] and "arXiv" in row["paper"] for row in listed)
    assert all(name in run("schedules") for name in schedules.names())


def test_schedules_tells_all_about_one_family():
    told = run("schedules", "interleaved-1f1b")
    one = json.loads(run("schedules", "interleaved-1f1b", "--json"))
    assert one["wins"] and one["loses"]
    assert one["options"][0]["name"] == "stages_per_rank"
    words = " ".join(told.split())
    for key in ("law", "wins", "loses", "paper"):
        assert f"{key} {one[key]}" in words
    assert "stages_per_rank (default 2)" in words
    assert "rank 1 │····1F0─" in told


def test_simulate_gives_both_bubbles_and_memory():
    answer = json.loads(run("simulate", "1f1b", "-p", "4", "-m", "8", "--json"))
    assert answer["makespan"] == 33
    assert answer["bubble"] == pytest.approx(3 / 11)
    assert answer["peak_activations"] == [4, 3, 2, 1]
    hops = json.loads(run("simulate", "1f1b", "--costs", "1,1,1,0.5", "--json"))
    assert hops["makespan"] > 33
    assert "27.27%" in run("simulate", "1f1b")


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "interleaved-1f1b:stages_per_rank=4", "chimera"])
def test_costs_are_those_of_a_whole_rank(name):
    """So that the makespans of schedules with one, two and four stages per rank compare."""
    answer = json.loads(run("simulate", name, "-m", "8", "--costs", "3,2,1", "--json"))
    work = 8 * (3 + 2 + 1)
    assert answer["makespan"] * (1 - answer["bubble"]) == pytest.approx(work)


def test_costs_may_be_a_file_with_a_number_per_stage(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text('{"forward": [1, 1, 1, 1, 1, 1, 1, 1], "backward_weight": 2, "hop": 0.5}')
    answer = json.loads(run("simulate", "zb-v", "--costs", str(path), "--json"))
    # Two stages per rank: 1 of forward each as listed, I and W as shares of a rank's 1 and 2.
    assert answer["makespan"] * (1 - answer["bubble"]) == pytest.approx(8 * (2 + 1 + 2))
    assert "has 8 numbers" in refused("simulate", "1f1b", "--costs", str(path))
    path.write_text('{"forwrd": 1}')
    assert "forwrd" in refused("simulate", "1f1b", "--costs", str(path))
    path.write_text('{"forward": -1}')
    assert f"{path}: costs: forward is -1" in refused("simulate", "1f1b", "--costs", str(path))


def test_draw_prints_or_writes(tmp_path):
    assert "rank 3 │" in run("draw", "1f1b")
    for suffix in ("svg", "html", "txt", "json"):
        path = tmp_path / f"picture.{suffix}"
        run("draw", "1f1b", "-o", str(path))
        assert path.stat().st_size > 100


@pytest.mark.parametrize("source", ["1f1b", "gpipe", "interleaved-1f1b:stages_per_rank=3"])
def test_very_many_microbatches_are_drawn_from_a_few(source, monkeypatch, tmp_path):
    assert "left out" not in run("draw", source, "-p", "2", "-m", "1000")  # there is room for all
    whole = json.loads(run("simulate", source, "-m", "6000", "--json"))

    def build_few(name, *, num_microbatches, **others):
        assert num_microbatches < 1_000
        return build(name, num_microbatches=num_microbatches, **others)

    build = families.build
    monkeypatch.setattr(families, "build", build_few)
    told = json.loads(run("draw", source, "-m", "6000", "--json"))
    assert told.pop("output") is None
    assert told.keys() == whole.keys()
    for name, value in told.items():
        exact = isinstance(value, str) or value is None
        assert value == (whole[name] if exact else pytest.approx(whole[name])), name
    run("draw", source, "-p", "16", "-m", "1000000", "-o", tmp_path / "many.svg")
    assert "ops left out" in run("draw", source, "-p", "2", "-m", "1000000")


def test_compare_puts_schedules_side_by_side(tmp_path):
    answer = json.loads(run("compare", "gpipe", "1f1b", "chimera", "-p", "4", "-m", "8", "--json"))
    assert [max(row["peak_activations"]) for row in answer] == [8, 4, 4]
    assert [row["num_hops"] for row in answer] == [2 * 3 * 8] * 3
    assert [row["weight_copies"] for row in answer] == [1, 1, 2]
    assert run("compare", "gpipe", "1f1b").count("rank 0 │") == 2
    for suffix in ("svg", "html"):
        run("compare", "gpipe", "1f1b", "-o", str(tmp_path / f"both.{suffix}"))
        assert (tmp_path / f"both.{suffix}").read_text().count('class="span"') == 2 * 4 * 8 * 2
    run("compare", "gpipe", "1f1b", "-o", str(tmp_path / "both.txt"))
    assert (tmp_path / "both.txt").read_text().count("rank 0 │") == 2
    run("compare", "gpipe", "1f1b", "--scatter", str(tmp_path / "points.svg"))
    assert ">gpipe<" in (tmp_path / "points.svg").read_text()


def test_compare_draws_in_the_terminal_only_what_can_be_read(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    printed = run("compare", "1f1b", "zb-v", "-p", "8", "-m", "32")
    assert "rank 0 │" not in printed
    assert "write a picture with -o" in printed
    assert "99.5" in printed
    narrow = run("compare", "1f1b", "zb-v", "-p", "4", "-m", "8")
    assert all(len(line) <= 100 for line in narrow.splitlines())
    assert "rank 3 │" in narrow


def test_options_of_a_family_follow_its_name():
    names = [f"interleaved-1f1b:stages_per_rank={v}" for v in (2, 4)]
    two, four = json.loads(run("compare", *names, "--json"))
    assert [two["name"], four["name"]] == names
    assert four["num_hops"] > two["num_hops"]
    assert four["makespan"] < two["makespan"]
    assert names[1] in run("compare", *names), "long names are not broken"


def test_a_timeline_has_neither_hops_nor_copies(tmp_path):
    path = tmp_path / "timeline.json"
    path.write_text(simulate(schedules.build("1f1b", num_ranks=2, num_microbatches=2)).to_json())
    assert json.loads(run("simulate", str(path), "--json"))["num_hops"] is None
    assert "–" in run("simulate", str(path))


def test_check_reads_torchs_csv(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    assert run("check", str(path)).startswith("ok: 8 ops on 2 ranks")
    assert json.loads(run("check", "gpipe", "--json"))["ok"] is True
    path.write_text("0F0,0B0\n1B0,1F0\n")
    assert refused("check", str(path)).startswith("schedule deadlocks: rank 0 waits to run 0B0")


def test_profile_plan_train_report_hand_files_on(tmp_path):
    graph, plan, folder = tmp_path / "graph.json", tmp_path / "plan.json", tmp_path / "report"
    workload = "tests.kit.small_workload:workload"
    told = run("profile", workload, "-m", "4", "--repeats", "2", "--ranks", "0", "-o", str(graph))
    assert "kept MiB" in told
    found = run(
        "plan",
        str(graph),
        "-m",
        "4",
        "-p",
        "2",
        "--stages",
        "2",
        "--schedule",
        "1f1b",
        "-o",
        str(plan),
        "--json",
    )
    assert json.loads(found)["schedule"] == "1f1b"
    drawn = run("draw", str(plan))
    assert "stage 1: " in drawn and "0→1: " in drawn and "rank 1 │" in drawn
    answer = json.loads(
        run("train", workload, "--plan", str(plan), "--steps", "6", "--compare", "-o", str(folder),
            "--timeline", str(tmp_path / "step.json"), "--json")
    )  # fmt: skip
    assert answer["num_steps"] == 6
    assert "1f1b, measured" in run("draw", str(tmp_path / "step.json"))
    assert "1f1b" in run("compare", str(tmp_path / "step.json"), str(plan))
    assert answer["largest_loss_difference"] == 0
    (folder / "index.html").unlink()
    told = run("report", str(folder))
    assert "step time, measured" in told and "first op unlike its prediction" in told
    assert "<html" in (folder / "index.html").read_text()
    assert "1f1b, measured" in run("draw", str(folder / "run.json"))


@pytest.mark.usefixtures("small_demo")
def test_demo_does_the_whole_job(tmp_path):
    answer = json.loads(run("demo", "--steps", "2", "-o", str(tmp_path), "--json"))
    assert answer["largest_loss_difference"] == 0
    assert answer["largest_parameter_difference"] == 0
    assert (tmp_path / "index.html").exists()
    assert (tmp_path / "timelines.svg").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("simulate", "1f1"), "did you mean '1f1b'?"),
        (("schedules", "1f1"), "did you mean '1f1b'?"),
        (("simulate", "zb-v:waves=2"), "zb-v has no option waves; it takes replicas"),
        (("simulate", "interleaved-1f1b:stages_per_rank=x"), "stages_per_rank cannot be 'x'"),
        (("simulate", "interleaved-1f1b:stages_per_rank"), "write interleaved-1f1b:name=value"),
        (("draw", "breadth-first:stages_per_rank=2,stages_per_rank=3"), "given twice"),
        (
            ("compare", "1f1b", "-o", "picture.json"),
            "end the name in .txt, .svg, .pdf, .png, .html",
        ),
        (("compare", "1f1b", "--scatter", "picture.txt"), "must end in .svg"),
        (("simulate", "1f1b", "--costs", "missing.json"), "cannot read missing.json"),
        (("simulate", "1f1b", "--costs", "1,2"), "has 2 numbers"),
        (("simulate", "1f1b", "--costs", "1,x,1"), "not a list of numbers"),
        (("simulate", "1f1b", "--costs", "1,-1,1"), "must be ≥ 0"),
        (("draw", "1f1b", "-o", "picture.bmp"), "cannot draw 'picture.bmp'"),
        (("draw", "missing.json"), "cannot read missing.json"),
        (("draw", "pyproject.toml"), "pyproject.toml is a file, but neither a .csv of ops nor"),
        (("check", "missing.csv"), "cannot read missing.csv"),
        (("plan", "missing.json"), "cannot read missing.json"),
        (("profile", "no_colon"), "write module:function"),
        (("profile", "no_such_module:workload"), "cannot load the workload"),
        (("profile", "tests.kit.small_workload:nothing"), "returned a str"),
        (("report", "no-such-folder"), "cannot read"),
        (("train", "--steps", "0"), "--steps"),
    ],
)
def test_wrong_input_gets_one_clear_message(arguments, message):
    assert message in refused(*arguments)


def test_a_file_that_is_no_plan_says_what_it_is(tmp_path):
    """ "unknown field `layers`" was said of a profile."""
    graph, cluster = tmp_path / "graph.json", tmp_path / "cluster.json"
    layer = {"name": "a", "forward_seconds": 1.0, "backward_input_seconds": 1.0}
    graph.write_text(json.dumps({"layers": [{**layer, "backward_weight_seconds": 1.0}]}))
    run("cluster", "-p", "1", "-o", cluster)
    for verb in (("explain",), ("verify",), ("train", "--plan"), ("rehearse",)):
        told = refused(*verb, str(graph))
        assert f"{graph} holds a model's profile, where a plan" in told
        assert f"`penstock plan {graph}` makes a plan of it" in told
    assert "holds a cluster, where a plan is wanted" in refused("explain", str(cluster))


@pytest.mark.usefixtures("small_demo")
def test_without_a_workload_a_plan_for_another_model_asks_for_one(tmp_path):
    """The demo's model was taken, and the plan blamed for it."""
    plan = tmp_path / "plan.json"
    stages = (StagePlan(layers=("mine",), rank=0),)
    Plan(model="m", schedule="1f1b", num_microbatches=2, stages=stages).save(plan)
    for verb in (("verify",), ("train", "--plan")):
        told = refused(*verb, str(plan))
        assert "is not for the demo's model" in told and "name yours behind the plan" in told


def test_a_plan_for_another_model_or_with_an_unknown_key_is_refused(tmp_path):
    graph, plan = tmp_path / "graph.json", tmp_path / "plan.json"
    workload = "tests.kit.small_workload:workload"
    run("profile", workload, "-m", "4", "--repeats", "1", "--ranks", "0", "-o", graph)
    run("plan", str(graph), "-m", "4", "-o", str(plan))
    demo = "penstock.demo:workload"
    assert "made for another model" in refused("train", demo, "--plan", str(plan))
    plan.write_text(plan.read_text().replace('"schedule"', '"shedule"'))
    message = refused("draw", str(plan))
    assert "shedule" in message
    assert str(plan) in message


def test_errors_are_one_line_on_standard_error_and_torch_stays_out():
    code = (
        "import sys; sys.argv = ['penstock', 'simulate', 'nope']\n"
        "import atexit; atexit.register(lambda: print('torch' in sys.modules))\n"
        "from penstock.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("penstock: no schedule is called 'nope'")
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("name", ["breadth-first", "interleaved-zb", "chimera", "seq1f1b"])
def test_check_proves_every_family_with_channels_of_one_message(name):
    assert "even when a channel holds 1 message" in run("check", name, "-m", "16")
    in_order = run("check", name, "-m", "16", "--capacity", "0")
    assert "cannot deadlock even when a channel holds nothing" in in_order


def test_torchs_files_are_read(tmp_path):
    path = tmp_path / "torch.csv"
    path.write_text("0UNSHARD,0F0,0SEND_F0,,0RECV_B0,0B0,0REDUCE_GRAD\n1RECV_F0,1F0,1B0,1SEND_B0\n")
    assert "ok: " in run("check", str(path))
    assert "rank 1 │" in run("draw", str(path))
    path.write_text("\ufeff0F0,0B0\n")
    assert "ok: " in run("check", str(path))


def test_of_several_sources_the_wrong_one_is_named(tmp_path):
    good, bad, trace = (tmp_path / name for name in ("good.csv", "bad.csv", "trace.json"))
    good.write_text("0F0,0B0\n")
    bad.write_text("0F0,garbage\n")
    message = refused("compare", str(good), str(bad))
    assert "bad.csv: line 1, cell 2: 'garbage' is not an op" in message
    bad.write_text("0F" + "9" * 5000 + ",0B0\n")
    assert "bad.csv: line 1, cell 1" in refused("check", str(bad))
    run("draw", "1f1b", "-o", str(trace))
    assert "holds a Chrome trace" in refused("draw", str(trace))
    costs = tmp_path / "costs.json"
    costs.write_text('{"forward": [1, 2, 3, 4]}')
    assert "zb-v: costs: forward has 4 numbers" in refused(
        "compare", "1f1b", "zb-v", "--costs", str(costs)
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("zb-auto:objective=speed", "objective is 'speed'; take makespan or stage"),
        ("zb-auto:sizes=3", "sizes can be given from Python only"),
        ("zb-auto:activation_limit=nan", "activation_limit is nan, but must be ≥ 0"),
        ("zb-auto:activation_limit=0.5", "holds 1 there; allow at least that"),
        ("chimera:waves=2", "chimera has no option waves"),
    ],
)
def test_an_option_that_cannot_be_is_refused_in_one_line(source, message):
    told = refused("simulate", source, "-p", "2", "-m", "4")
    assert message in told
    assert "\n" not in told.strip()


def started(monkeypatch, capsys, *arguments):
    """Exit status, standard output and standard error of what a shell starts."""
    monkeypatch.setattr(sys, "argv", ["penstock", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, *capsys.readouterr()


def test_ctrl_c_is_said_in_a_line(monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("penstock.cli.sources.load_shown", interrupted)
    status, output, told = started(monkeypatch, capsys, "simulate", "1f1b")
    assert (status, output, told.strip()) == (130, "", "penstock: interrupted")


def test_what_click_refuses_is_one_line_too(monkeypatch, capsys):
    for arguments in (["draw"], ["nonsense"], ["simulate", "1f1b", "-p", "x"]):
        code, _, told = started(monkeypatch, capsys, *arguments)
        assert code == 2
        assert told.startswith("penstock: ")
        assert told.count("\n") == 1
    code, out, _ = started(monkeypatch, capsys, "--help")
    assert code == 0 and "compare" in out
    assert started(monkeypatch, capsys)[2].startswith("Usage: ")


@pytest.mark.parametrize(
    "arguments",
    [
        ("simulate", "1f1b", "-p", "0"),
        ("simulate", "1f1b", "-m", "-3"),
        ("simulate", "1f1b", "--arrivals", "0"),
        ("check", "1f1b", "--capacity", "-1"),
        ("cluster", "-p", "0"),
        ("contest", "-m", "0"),
        ("plan", "graph.json", "-m", "0"),
        ("plan", "graph.json", "--minibatch", "0"),
        ("plan", "graph.json", "--stages", "0"),
        ("plan", "graph.json", "--rate", "-1"),
        ("profile", "--repeats", "0"),
        ("rehearse", "1f1b", "-m", "0"),
        ("train", "-m", "0"),
    ],
)
def test_a_number_below_what_can_be_is_a_wrong_usage(arguments, monkeypatch, capsys):
    """``-m 0`` ended with 1 where other options that cannot be end with 2."""
    code, _, told = started(monkeypatch, capsys, *arguments)
    assert code == 2
    assert "is not in the range" in told and "--help" in told


@pytest.mark.parametrize(
    ("source", "more", "rank", "reads"),
    [
        ("pipedream", (), 0, "0 0 0 0 1 0 2 0 3 1 2 3"),
        ("pipedream", ("--policy", "stash"), 2, "0 0 1 1 2 2 3 3 4 4 5 5"),
        ("pipedream", ("--policy", "latest"), 0, "0 0 0 0 1 1 2 2 3 3 4 5"),
        ("pipedream", ("--policy", "vertical-sync"), 2, "0 0 0 0 0 0 1 1 2 2 3 3"),
        ("pipedream", ("--policy", "pipemare"), 2, "0 0 0 0 0 0 1 1 1 1 1 1"),
        ("pipedream-2bw:minibatch=2", (), 2, "0 0 0 0 0 0 0 0 1 1 1 1"),
        ("pipedream:replicas=1-2", (), 1, "0 0 1 1 2 2"),
        ("1f1b", (), 0, "0 0 0 0 0 0 0 0 0 0 0 0"),
        ("interleaved-1f1b", ("--policy", "flush"), 0, "0 " * 24),
        ("seq1f1b", (), 0, "0 " * 24),
    ],
)
def test_draw_shows_which_versions_ops_read(source, more, rank, reads):
    drawn = run("draw", source, "-p", "3", "-m", "6", "--versions", *more).splitlines()
    line = drawn[2 + 2 * rank]
    assert line.startswith("reads  │")
    assert line.split("│")[1].split() == reads.split()
    if more:
        assert run("draw", source, "-p", "3", "-m", "6", *more).splitlines() == drawn


def test_a_picture_of_versions_names_the_policy_and_fits_a_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    drawn = run("draw", "pipedream", "-p", "4", "-m", "12", "--versions")
    assert drawn.startswith("pipedream (stash), predicted: makespan 45")
    assert max(map(len, drawn.splitlines())) <= 120
    steady = run("draw", "pipedream", "-p", "4", "-m", "12")
    assert "in its steady state" in steady and re.search("reads *│ 5 2", steady)
    assert "reads" not in run("draw", "1f1b", "-p", "4", "-m", "12")


def test_versions_of_files(tmp_path):
    timeline, picture, plan = (tmp_path / name for name in ("t.json", "t.svg", "plan.json"))
    shown = simulate(schedules.build("1f1b", num_ranks=1, num_microbatches=1))
    timeline.write_text(shown.with_versions([[7, 8]]).to_json())
    assert "reads  │ 7 8  │" in run("draw", str(timeline), "--versions")
    run("draw", str(timeline), "--versions", "-o", str(picture))
    assert "reads version 7" in picture.read_text()
    stages = tuple(
        StagePlan(layers=(str(rank),), rank=rank, forward_seconds=1, backward_input_seconds=2)
        for rank in range(2)
    )
    for schedule, more, newest in (
        ("1f1b", (), 0),
        ("pipedream", (), 7),
        ("pipedream", ("--policy", "vertical-sync"), 6),
    ):
        Plan(model="m", schedule=schedule, num_microbatches=2, stages=stages).save(plan)
        drawn = run("draw", str(plan), "--versions", *more).splitlines()
        assert drawn[0].startswith(f"{schedule}: 2 stages on 2 ranks")
        reads = [line for line in drawn if line.startswith("reads  │")]
        read = {int(number) for number in reads[1].split("│")[1].split()}
        assert read == set(range(newest + 1))


@pytest.mark.parametrize(
    ("source", "more", "message"),
    [
        ("{timeline}", ("--versions",), "timeline.json does not say which versions"),
        ("{timeline}", ("--policy", "stash"), "timeline.json is a timeline"),
        ("{updated}", ("--versions",), "updated.csv has updates, but does not say"),
        ("1f1b", ("--policy", "stash"), "the policy stash is for schedules that never flush"),
        ("pipedream", ("--policy", "flush"), "pipedream never flushes"),
        ("pipedream", ("--policy", "newest"), "'newest' is not one of"),
        ("pipedream:replicas=2-1-1", ("--policy", "vertical-sync"), "as many replicas"),
        ("pipedream-2bw:minibatch=1", ("--versions",), "minibatch of 1 microbatches is too short"),
    ],
)
def test_versions_that_nobody_knows_are_refused(tmp_path, source, more, message):
    files = {"timeline": tmp_path / "timeline.json", "updated": tmp_path / "updated.csv"}
    plain = schedules.build("1f1b", num_ranks=2, num_microbatches=2)
    files["timeline"].write_text(simulate(plain).to_json())
    files["updated"].write_text("0F0,0B0,0UPDATE0\n")
    told = refused("draw", source.format(**files), *more)
    assert message in told


def test_ops_of_a_csv_read_the_weights_of_before_the_flush(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text("0F0,0F1,0B0,0B1\n")
    assert "reads  │ 0 0 0   0  │" in run("draw", str(path), "--versions")


def test_the_package_itself_is_the_command_line():
    told = subprocess.run(
        [sys.executable, "-m", "penstock", "schedules", "1f1b"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "1f1b" in told.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("explain", "zb-h1"),
            "zb-h1 is the name of a schedule, where a plan is wanted; `penstock plan GRAPH "
            "--schedule zb-h1 -o plan.json` plans with it, `penstock schedules zb-h1` tells",
        ),
        (("train", "--plan", "ZB-H1"), "ZB-H1 is the name of a schedule, where a plan is wanted"),
        (("plan", "1f1b"), "1f1b is the name of a schedule, where a model's profile is wanted"),
        (("explain", "zb-h9"), "cannot read zb-h9: No such file"),
    ],
)
def test_the_name_of_a_schedule_is_no_file(arguments, message, tmp_path, monkeypatch):
    """ "cannot read zb-h1: No such file or directory" was said."""
    monkeypatch.chdir(tmp_path)
    assert message in refused(*arguments)
    (tmp_path / "zb-h1").write_text("{}")  # but a file may be called so
    assert "zb-h1 is not a valid Plan" in refused("explain", "zb-h1")


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("plan graph.json --devices 4", "-p/--ranks"),
        ("simulate 1f1b --num-microbatches 4", "-m/--microbatches"),
        ("plan graph.json --replica 4", "--replicas"),
    ],
)
def test_an_option_that_others_have_is_known_by_its_name_here(words, meant, monkeypatch, capsys):
    """`--devices` was taken for `--replicas`."""
    monkeypatch.setattr(sys, "argv", ["penstock", *words.split()])
    # Else click names the command by how these tests are started.
    monkeypatch.setattr(sys.modules["__main__"], "__package__", None)
    with pytest.raises(SystemExit):
        main()
    assert f"Did you mean '{meant}'?; try penstock" in capsys.readouterr().err
