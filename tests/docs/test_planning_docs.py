"""The page about planning: its commands run, and what it shows is what comes out."""

import re
import shlex

import pytest
from click.testing import CliRunner

from penstock.cli import penstock
from tests.kit.paths import ROOT

PAGE = (ROOT / "docs" / "planning.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def commands() -> list[tuple[list[str], list[str]]]:
    """(words behind ``penstock``, lines that it prints) of every command."""
    found: list[tuple[list[str], list[str]]] = []
    for block in blocks("console"):
        for line in block.splitlines():
            if line.startswith("$ penstock "):
                found.append((shlex.split(line)[2:], []))
            else:
                found[-1][1].append(line)
    return found


# What they share takes long to make: one worker makes it.
pytestmark = pytest.mark.xdist_group("planning-page")


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    """Exit code and output of every command, by its words, run one after another.

    Times are not what the page is about: one measurement of each is enough.
    """
    here = tmp_path_factory.mktemp("planning")
    (here / "tests").symlink_to(ROOT / "tests")
    for name, text in zip(("cluster", "servers", "mixed"), blocks("toml"), strict=True):
        (here / f"{name}.toml").write_text(text)
    found = {}
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(here)
        patched.setenv("COLUMNS", "80")
        for words, _ in commands():
            quick = ["--repeats", "1", "--ranks", "0"] if words[0] == "profile" else []
            result = CliRunner().invoke(penstock, [*words, *quick])
            found[tuple(words)] = (result.exit_code, result.output + str(result.exception or ""))
        exec(blocks("python")[0], {})
    return found


def test_every_command_runs(results):
    for words, (code, output) in results.items():
        assert code == ("--memory" in words), (words, output)
    assert len(results) == 10


def test_what_does_not_fit_says_what_would(results):
    (refusal,) = (text for words, (_, text) in results.items() if "--memory" in words)
    # The profile was measured just now, so the numbers of the page are of another run.
    shape = r"needs [\d.]+ MiB on rank \d .*, [\d.]+ MiB over the 40 MiB allowed: .* fits"
    assert re.search(shape, refusal)
    assert re.search(shape, PAGE)


@pytest.mark.parametrize("index", [5, 9], ids=["why", "what if"])
def test_what_the_page_shows_of_vgg_is_what_comes_out(results, index):
    words, shown = commands()[index]
    printed = [line.rstrip() for line in results[tuple(words)][1].splitlines()]
    for line in shown:
        if line not in ("…", ""):
            assert line in printed
