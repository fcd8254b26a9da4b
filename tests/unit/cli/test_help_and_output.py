"""What holds of every verb: its help, its examples, where it writes, what a shell completes."""

import json
import shlex
import subprocess
import sys
from xml.etree import ElementTree

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

import penstock.cli
from penstock.cli import EXAMPLES
from penstock.cli import penstock as program
from penstock.core.schedule import families
from penstock.core.versions import POLICIES


def verbs():
    """(words, command) of every verb, those in groups too."""
    for name in program.list_commands(None):
        command = program.commands[name]
        if isinstance(command, click.Group):
            yield from ((f"{name} {inner}", one) for inner, one in command.commands.items())
        else:
            yield name, command


VERBS = dict(verbs())


def invoke(*words, **how):
    return CliRunner().invoke(program, list(words), **how)


def completed(words, incomplete):
    completion = ShellComplete(program, {}, "penstock", "_PENSTOCK_COMPLETE")
    return completion.get_completions(words, incomplete)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_an_example_in_its_help_that_its_parser_takes(verb, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert verb in EXAMPLES, "say in cli.py how people call it"
    told = invoke(*verb.split(), "--help").output
    for example in EXAMPLES[verb]:
        assert f"\n    penstock {example}\n" in told
        words = shlex.split(example.partition(" > ")[0])
        assert " ".join(words[: len(verb.split())]) == verb
        # Reads all words and calls all callbacks; the verb itself is not called.
        VERBS[verb].make_context(verb, words[len(verb.split()) :])


def test_examples_are_of_verbs_that_there_are():
    assert set(EXAMPLES) == set(VERBS)


def test_the_list_of_verbs_has_whole_sentences():
    told = invoke("--help").output
    assert "…" not in told and "..." not in told.partition("Commands:")[2]
    one_line = " ".join(told.split())
    assert "beside one device" in one_line and "a model could use it" in one_line


@pytest.mark.parametrize(
    ("words", "suffix"),
    [("draw 1f1b", "svg"), ("compare 1f1b gpipe", "svg"), ("cluster -p 2", "json")],
)
def test_a_hyphen_is_standard_output_with_nothing_else_in_it(words, suffix, tmp_path):
    result = invoke(*words.split(), "-o", "-")
    assert result.exit_code == 0, result.output
    file = tmp_path / f"x.{suffix}"
    assert invoke(*words.split(), "-o", str(file)).exit_code == 0
    assert result.stdout == file.read_text()
    (ElementTree.fromstring if suffix == "svg" else json.loads)(result.stdout)


def test_a_plan_goes_to_standard_output(tmp_path):
    graph = "tests/data/pipedream/vgg16/graph.txt"
    words = ["plan", graph, "-p", "2", "-m", "4", "--schedule", "1F1B", "--stages", "2"]
    result = invoke(*words, "-o", "-")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["schedule"] == "1f1b"
    again = invoke("draw", str(_saved(tmp_path, result.stdout)), "-o", "-")
    assert again.stdout.startswith("<svg")


def _saved(folder, text):
    (folder / "plan.json").write_text(text)
    return folder / "plan.json"


@pytest.mark.parametrize("words", ["draw 1f1b -o - --json", "draw --json 1f1b -o -"])
def test_two_results_on_standard_output_are_refused(words):
    result = invoke(*words.split())
    assert result.exit_code == 2
    assert "leave one out" in result.output


WRITING = [
    (verb, option.opts[0])
    for verb, command in VERBS.items()
    for option in command.params
    if {"--output", "--draw", "--timeline", "--scatter", "--memory"} & {*option.opts}
    and (verb, option.opts[0]) != ("plan", "--memory")
]


@pytest.mark.parametrize(("verb", "option"), WRITING)
def test_a_folder_that_is_not_there_is_refused_before_any_work(verb, option, tmp_path):
    parameter = next(one for one in VERBS[verb].params if option in one.opts)
    context = click.Context(VERBS[verb], info_name=verb)
    nowhere = tmp_path / "nowhere" / "x.svg"
    with pytest.raises(click.UsageError, match=r"there is no folder .*nowhere"):
        parameter.type_cast_value(context, str(nowhere))
    assert not nowhere.parent.exists()
    parameter.type_cast_value(context, str(tmp_path / "x.svg"))


def test_most_verbs_write():
    assert len(WRITING) >= 14


@pytest.mark.parametrize("verb", ["train", "demo"])
def test_a_report_is_no_stream_and_no_file(verb, tmp_path):
    (tmp_path / "there").write_text("")
    assert "standard output cannot be" in invoke(verb, "-o", "-").output
    assert "is a file" in invoke(verb, "-o", str(tmp_path / "there")).output
    assert "is a folder" in invoke("draw", "1f1b", "-o", str(tmp_path)).output


@pytest.mark.parametrize("name", ["1F1B", "Zb-H1", "INTERLEAVED-1F1B:stages_per_rank=4"])
def test_names_may_be_in_capitals(name):
    told = invoke("simulate", name, "--json")
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout) == json.loads(invoke("simulate", name.lower(), "--json").stdout)


def test_policies_may_be_in_capitals():
    result = invoke("draw", "pipedream", "--policy", "STASH", "-o", "-")
    assert result.exit_code == 0, result.output


def test_a_usage_error_is_one_line_that_says_where_help_is(tmp_path):
    for words, line in {
        ("draw", "1f1b", "--nope"): "No such option '--nope'; try penstock draw --help",
        ("draw",): "Missing argument 'SOURCE'; try penstock draw --help",
        ("checkpoint", "show"): "Missing argument 'FOLDER'; try penstock checkpoint show --help",
        ("nope",): "No such command 'nope'; try penstock --help",
    }.items():
        run = subprocess.run(
            [sys.executable, "-c", f"import sys; sys.argv = {['penstock', *words]!r}\n" + MAIN],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert run.returncode == 2
        assert run.stderr == f"penstock: {line}\n"


MAIN = "from penstock.cli import main; main()"


def test_schedules_policies_and_files_are_completed():
    found = completed(["draw"], "z")
    assert [one.value for one in found if one.type == "plain"] == [
        name for name in families.names() if name.startswith("z")
    ]
    assert "file" in [one.type for one in found]
    assert [one.value for one in completed(["draw"], "ZB-H")][:2] == ["zb-h1", "zb-h2"]
    assert {one.value for one in completed(["schedules"], "")} == set(families.names())
    assert {one.value for one in completed(["plan", "--schedule"], "")} == set(families.names())
    assert {one.value for one in completed(["plan", "--versions"], "")} == set(POLICIES)
    assert {one.value for one in completed(["draw", "--policy"], "")} == set(POLICIES)
    assert [one.value for one in completed([], "sim")] == ["simulate"]
    assert [one.type for one in completed(["draw", "-o"], "x")] == ["file"]
    assert [one.type for one in completed(["train", "-o"], "x")] == ["dir"]


@pytest.mark.parametrize("verb", VERBS)
def test_what_names_a_file_is_completed_as_one(verb):
    for parameter in VERBS[verb].params:
        if parameter.name in ("output", "graph", "cluster", "file", "folder", "plan", "plans"):
            (item,) = parameter.type.shell_complete(None, parameter, "x")
            assert item.type in ("file", "dir"), parameter.name


def test_completion_starts_in_a_shell():
    assert penstock.cli.penstock.name == "penstock"
    run = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv = ['penstock']\n" + MAIN],
        env={"PATH": "", "_PENSTOCK_COMPLETE": "bash_complete", "COMP_CWORD": "2",
             "COMP_WORDS": "penstock draw 1f", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert run.stdout.splitlines()[0] == "plain,1f1b"


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
def test_what_never_flushes_is_drawn_in_its_steady_state_with_versions(name):
    told = invoke("draw", name, "-p", "3", "-m", "4").output
    assert "\nreads" in told
    assert "F0" not in told  # the beginning
    from_the_beginning = invoke("draw", name, "-p", "3", "-m", "4", "--versions").output
    assert "F0" in from_the_beginning


def test_a_plan_that_never_flushes_is_drawn_in_its_steady_state(tmp_path):
    words = "plan tests/data/pipedream/vgg16/graph.txt -p 2 -m 4 --schedule pipedream --stages 2"
    plan = _saved(tmp_path, invoke(*words.split(), "-o", "-").stdout)
    told = invoke("draw", str(plan)).output
    assert "in its steady state" in told and "\nreads" in told
