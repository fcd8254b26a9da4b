"""The command line: one function per verb with the examples that end its help, and one place where
errors become messages.
"""

from __future__ import annotations

import importlib
import sys
from collections import UserDict
from typing import Any

import click

from penstock import __version__
from penstock.base.errors import PenstockError, printable

EXAMPLES: dict[str, tuple[str, ...]] = {
    "check": ("check zb-v -p 4 -m 8", "check schedule.csv --capacity 0"),
    "checkpoint show": ("checkpoint show runs/a",),
    "checkpoint draw": ("checkpoint draw runs/a plan.json -o readings.svg",),
    "checkpoint export": (
        "checkpoint export runs/a -o weights.safetensors",
        "checkpoint export runs/a --to dcp -o exported",
    ),
    "cluster": ("cluster -p 2 -o cluster.json", "cluster cluster.toml"),
    "compare": (
        "compare gpipe 1f1b zb-h1 -p 8 -m 32",
        "compare plan.json run.json --memory memory.svg",
    ),
    "contest": ("contest --quick -o contest.html", "contest mymodel:workload -p 4 --on emulated"),
    "demo": ("demo --steps 20",),
    "draw": (
        "draw 1f1b -p 4 -m 8 -o 1f1b.svg",
        "draw plan.json -o plan.pdf --width 800",
        "draw pipedream --versions -o - > pipedream.svg",
    ),
    "devices": ("devices", "devices h100-sxm"),
    "estimate": ("estimate mymodel:workload --device h100-sxm -o graph.json",),
    "export": ("export plan.json --to torchtitan -o handover",),
    "explain": ("explain plan.json --learning-rate 0.1 --curvature 20",),
    "fleet": ("fleet fleet.toml --simulate -o fleet.svg",),
    "import": ("import train.sh graph.json cluster.toml --from megatron -o theirs.json",),
    "measure-cluster": ("measure-cluster --ranks 4 -o cluster.json",),
    "measure-device": ("measure-device -o mine.toml",),
    "plan": (
        "plan graph.json -p 4 -m 16 -o plan.json",
        "plan graph.json cluster.toml --minibatch 64 --memory 8GiB",
        "plan estimate.json 8xh100-sxm -m 32",
        "plan graph.json -p 8 -m 32 --engine megatron",
    ),
    "profile": ("profile mymodel:workload -m 8 -o graph.json",),
    "rehearse": ("rehearse plan.json -o rehearsal.html", "rehearse 1f1b -p 8 -m 16 --op-ms 5"),
    "report": ("report penstock-report",),
    "run": ("run train.py -n 4 --restarts 3",),
    "schedules": ("schedules", "schedules zb-h1"),
    "serve": ("serve --listen 0.0.0.0:5600 --job run-7",),
    "simulate": (
        "simulate interleaved-1f1b:stages_per_rank=4 -p 4 -m 16",
        "simulate plan.json --json",
    ),
    "trace": ("trace rank0.json rank1.json --plan plan.json -o timeline.json",),
    "train": ("train mymodel:workload --plan plan.json --steps 100",),
    "verify": ("verify plan.json mymodel:workload --steps 3",),
}
"""By verb, or group and verb, without the program's name."""


def _epilog_of(verb: str) -> str:
    """The examples of a verb as a paragraph that is not wrapped; nothing where there are none."""
    shown = EXAMPLES.get(verb, ())
    if not shown:
        return ""
    head = "Example:" if len(shown) == 1 else "Examples:"
    return "\n".join(["\b", head, *(f"  penstock {example}" for example in shown)])


_PLACES = {
    "check": ("schedule_verbs", "check"),
    "checkpoint": ("checkpoint_verb", "checkpoint"),
    "cluster": ("cluster_verb", "cluster"),
    "compare": ("schedule_verbs", "compare"),
    "contest": ("trial_verbs", "contest"),
    "demo": ("model_verbs", "demo"),
    "draw": ("schedule_verbs", "draw"),
    "devices": ("estimate_verb", "devices"),
    "estimate": ("estimate_verb", "estimate"),
    "explain": ("explain_verb", "explain_plan"),
    "export": ("engine_verbs", "export"),
    "fleet": ("fleet_verb", "fleet"),
    "import": ("engine_verbs", "adopt"),
    "measure-cluster": ("cluster_verb", "measure_cluster"),
    "measure-device": ("estimate_verb", "measure_device"),
    "plan": ("plan_verb", "plan"),
    "profile": ("model_verbs", "profile"),
    "rehearse": ("rehearse_verb", "rehearse"),
    "report": ("model_verbs", "report"),
    "run": ("run_verb", "run"),
    "schedules": ("schedule_verbs", "schedules"),
    "serve": ("serve_verb", "serve"),
    "simulate": ("schedule_verbs", "simulate"),
    "trace": ("engine_verbs", "trace"),
    "train": ("model_verbs", "train"),
    "verify": ("trial_verbs", "verify"),
}
"""For each verb, the file here that has it, and its function there."""


class _Verbs(UserDict[str, Any]):
    """Commands by name, each loaded when it is asked for: only the list of all needs them all."""

    def __getitem__(self, name: str) -> click.Command:
        module, function = super().__getitem__(name)
        command: click.Command = getattr(importlib.import_module(f"{__name__}.{module}"), function)
        _explain(command, name)
        return command


def _explain(command: click.Command, verb: str) -> None:
    """Give a verb's help its examples, and lists of verbs its whole first sentence."""
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            _explain(inner, f"{verb} {name}")
    example, epilog = _epilog_of(verb), command.epilog or ""
    if example not in epilog:
        command.epilog = f"{epilog}\n\n{example}".strip("\n")
    if command.help and not command.short_help:
        paragraph = " ".join(command.help.split("\n\n")[0].split())
        command.short_help = paragraph.partition(". ")[0].rstrip(".")


@click.group(
    commands=_Verbs(_PLACES),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="penstock")
def penstock() -> None:
    """Profile, plan, check, simulate, run and draw pipeline-parallel training.

    Try `penstock demo`, or `penstock draw 1f1b -p 4 -m 8`.
    """


_OTHER_NAMES = {
    "ranks": ("--devices", "--gpus", "--num-ranks", "--nproc-per-node", "--world-size"),
    "microbatches": ("--num-microbatches", "--micro-batches", "--chunks"),
}
"""By parameter, what others call its option: more like others of ours than like it."""


def _message_of(error: click.UsageError) -> str:
    """What an error says; of an option that others have, its name here."""
    if isinstance(error, click.NoSuchOption) and error.ctx is not None:
        meant = [
            "/".join(parameter.opts)
            for parameter in error.ctx.command.params
            if error.option_name in _OTHER_NAMES.get(parameter.name or "", ())
        ]
        if meant:  # click offers only what is spelled alike
            return f"No such option {error.option_name!r}. Did you mean {meant[0]!r}?"
    return error.format_message().rstrip(".")


def main() -> None:
    """Run the command line; what Penstock refuses becomes one message, not a traceback."""
    try:
        sys.exit(penstock(standalone_mode=False))
    except PenstockError as error:
        click.echo(f"penstock: {error}", err=True)
        sys.exit(1)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "penstock"
        message = _message_of(error)
        click.echo(printable(f"penstock: {message}; try {path} --help"), err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        click.echo(printable(f"penstock: {error.format_message()}"), err=True)
        sys.exit(error.exit_code)
    except click.Abort:
        click.echo("penstock: interrupted", err=True)
        sys.exit(130)
