"""Blocks of a page, and what it takes to run each of them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

from click.testing import CliRunner

from penstock.cli import penstock
from tests.kit.paths import ROOT

QUICK = {
    "profile": ["--repeats", "1", "--ranks", "0"],
    "train": ["--steps", "1", "--no-compare"],
    "verify": ["--steps", "2"],
    # All methods have tests of their own, in unit/trial.
    "contest": ["--steps", "1", "--methods", "1f1b"],
    # That its processes start and meet is for unit/cli/test_rehearse.py and unit/rehearsal.
    "rehearse": ["--steps", "2", "--op-ms", "2", "--transport", "threads"],
}
"""Options that make a command quick and change nothing of what it prints about."""
SHALLOW = "num_hidden_layers=32", "num_hidden_layers=2"
"""Of a published model, which the page describes for a catalogue: its blocks are all alike."""
QUICK_PROFILE = {"repeats": 1, "ranks": 0}
"""What the verb ``profile`` is given above, for ``pk.profile``."""


class Block(NamedTuple):
    """A fenced block of a page.

    ``before`` is the prose above it, in which a block of TOML is given its file name.
    """

    page: str
    line: int
    language: str
    text: str
    before: str

    @property
    def place(self):
        return f"{self.page}:{self.line}"


def blocks_of(page):
    """The fenced blocks of a page, in order."""
    text = (ROOT / page).read_text()
    return [
        Block(
            page,
            text.count("\n", 0, match.start()) + 2,
            match[1],
            match[2],
            text[: match.start()].rsplit("```", 1)[-1],
        )
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    ]


def run_page(page, namespace):
    """Run every block of a page in the current folder, Python in one namespace."""
    for block in blocks_of(page):
        match block.language:
            case "python":
                exec(compile(block.text.replace(*SHALLOW), block.place, "exec"), namespace)
            case "toml":
                _write(block)
            case "console" | "bash":
                for command, output in commands_of(block):
                    run_command(block, command, output)


def commands_of(block):
    """(command, what the page shows as its output) of a console block."""
    commands = []
    text = re.sub(r" *\\\n *", " ", block.text)
    for line in text.splitlines():
        if line.startswith("$ ") or block.language == "bash":
            commands.append((line.removeprefix("$ ").split("  #")[0], []))
        else:
            commands[-1][1].append(line)
    return [(command, "\n".join(output)) for command, output in commands]


def run_command(block, command, output):
    """Run a command line of Penstock; of any other, see that what it starts is there.

    What is started with make, pip, torchrun, penstock run, penstock demo or python has tests of
    its own, or takes minutes.
    """
    for part in command.split(" && "):
        words = shlex.split(part)
        if words == ["penstock", "demo"]:
            continue
        if words[0] == "penstock" and words[1] != "run":
            refused = output.startswith("penstock: ")
            result = CliRunner().invoke(penstock, [*words[1:], *QUICK.get(words[1], [])])
            said = f"{block.place}: {part}\n{result.output}{result.exception or ''}"
            assert (result.exit_code != 0) == refused, said
        elif words[:2] == ["pip", "install"]:
            assert words[2:] == ["-e", "."], f"{block.place}: {part}"
        elif words[0] == "make":
            targets = (ROOT / "Makefile").read_text()
            assert f"\n{words[1]}:" in targets, f"{block.place}: {part}"
        else:
            _check_script(block, part)


def _check_script(block, command):
    scripts = re.findall(r"[\w/]+\.py\b", command)
    scripts += [f"{name.replace('.', '/')}.py" for name in re.findall(r"-m ([\w.]+)", command)]
    assert scripts or "--no-python penstock" in command, f"{block.place}: {command}"
    for script in scripts:
        assert (ROOT / script).exists(), f"{block.place}: {command}"


def _write(block):
    named = re.findall(r"`([\w-]+\.toml)`", block.before)
    if named:
        Path(named[-1]).write_text(block.text)
