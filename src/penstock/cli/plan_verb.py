"""The verb that plans."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal, get_args

import click
from msgspec.structs import replace

from penstock.base.errors import InputError
from penstock.base.values import shown
from penstock.cli import options, show
from penstock.cli.input import InputFile, load_cluster, refuse_useless, suffix_of, text_of, title_of
from penstock.cli.options import ScheduleName
from penstock.cli.output import STANDARD_OUTPUT, write
from penstock.core.cluster import Cluster, Tier
from penstock.core.cluster.cluster import only
from penstock.core.cluster.local import measured_tier
from penstock.core.graph import LayerGraph
from penstock.planning import planner
from penstock.planning.handover.capabilities import CAPABILITIES
from penstock.planning.partition.chain import COST_MODELS
from penstock.planning.planner.request import Objective, RecomputeRule, SpillRule
from penstock.planning.plans.summing import REDUCERS, GatheredFor

if TYPE_CHECKING:
    from penstock.planning.plans import Plan


def _num_ranks(replicas: str) -> int:
    from penstock.core.schedule.families.options import read_replicas

    try:
        return sum(read_replicas(replicas))
    except InputError:
        raise click.BadParameter(
            f"{shown(replicas)} are no replicas; write for example 2-1-1, or any"
        ) from None


def _parse_tensor_ranks(_: click.Context, __: click.Parameter, text: str) -> int | Literal["any"]:
    if text == "any":
        return "any"
    if not re.fullmatch("[0-9]{1,18}", text) or int(text) < 1:
        raise click.BadParameter(
            f"{shown(text)} is no number of devices; write for example 2, or any"
        )
    return int(text)


@click.command()
@click.argument("graph", type=InputFile("LayerGraph"))
@click.argument("cluster", type=InputFile("Cluster"), required=False)
@options.ranks_option(None)
@options.microbatches_option(None)
@options.count_option(
    "--minibatch", help="Rows of a minibatch: tries every microbatch size profiled."
)
@options.count_option("--stages", help="Number of stages; default: the best.")
@click.option("--schedule", type=ScheduleName(), help="Schedule family; default: the best of all.")
@options.policy_option
@options.amount_option(
    "--rate",
    help="Frames per second of a live source: the fewest devices that keep up with it, with "
    "pipedream or partime.",
)
@click.option("--replicas", help="Ranks of each stage, as in 2-1-1, or any.")
@click.option("--memory", callback=options.parse_bytes, help="Limit per rank, for example 8GiB.")
@click.option(
    "--tier", "tiers", multiple=True, help="Folder to which stages may go, or host: main memory."
)
@options.choice_option(
    "--spill", among=get_args(SpillRule), default="where-needed",
    help="Whether stages may come from a tier and leave again.",
)  # fmt: skip
@click.option("--async", "asynchronous", is_flag=True, help="Also schedules that never flush.")
@options.choice_option(
    "--recompute", among=get_args(RecomputeRule), default="where-needed",
    help="Which stages may run forward twice to save memory.",
)  # fmt: skip
@click.option(
    "--tensor", "tensor_ranks", default="1", callback=_parse_tensor_ranks,
    help="Devices that share every layer, or any.",
)  # fmt: skip
@options.count_option(
    "--expert-ranks", default=1,
    help="Copies of each stage that divide the experts of its mixtures.",
)  # fmt: skip
@options.count_option(
    "--context", "context_ranks", default=1,
    help="Devices that share the sequence of every microbatch.",
)  # fmt: skip
@options.choice_option(
    "--reducer", among=[*REDUCERS, "any"], default="owners",
    help="How copies of a stage sum gradients.",
)  # fmt: skip
@options.count_option(
    "--stale", least=0, default=0,
    help="Updates by which gradients may be late, with --reducer parameter-server.",
)  # fmt: skip
@options.choice_option(
    "--gathered-for", among=get_args(GatheredFor), default="step",
    help="How long weights stay gathered, with --reducer fully-sharded.",
)  # fmt: skip
@click.option(
    "--hybrid", is_flag=True, help="Shard weights inside hosts only, with --reducer fully-sharded."
)
@options.choice_option(
    "--cost-model", among=COST_MODELS, default="ring",
    help="How exchanges of gradients are counted.",
)  # fmt: skip
@click.option(
    "--overlap", type=click.FloatRange(0, 1), default=0.0, show_default=True,
    help="Share of an exchange of gradients that hides behind the backward; 0: as simulated.",
)  # fmt: skip
@options.choice_option(
    "--layer-order", among=["execution", "any"], default="execution",
    help="Where branching models may be cut.",
)  # fmt: skip
@options.choice_option(
    "--placer", among=["exact", "reinforce"], default="exact",
    help="Exact cuts, or a learned placement of branching models.",
)  # fmt: skip
@options.choice_option(
    "--engine", among=CAPABILITIES, help="Only plans that another engine runs as they are."
)
@options.choice_option(
    "--objective", among=get_args(Objective), default="time",
    help="The shortest step, the fewest devices, or what a step costs.",
)  # fmt: skip
@options.amount_option(
    "--within", "within_seconds", metavar="SECONDS",
    help="How long a step may take, with --objective devices or cost.",
)  # fmt: skip
@options.amount_option(
    "--price-per-hour", metavar="X",
    help="Of each device, in any currency; by default what the cluster says.",
)  # fmt: skip
@options.amount_option(
    "--patience", "patience_seconds", metavar="SECONDS",
    help="Take the best plan found by then; so does Ctrl-C.",
)  # fmt: skip
@click.option(
    "--what-if", help='Plan again with changes, as in "hosts+1" or "bandwidth*2, memory/2".'
)
@click.option(
    "--html", metavar="FILE", help="Also write a page to choose from (.html), with all there is."
)
@options.output_option("Where to write the plan (.json).")
@options.json_option
@options.verbose_option("what the memory of each stage is spent on, and what was measured.")
def plan(
    graph: str,
    cluster: str | None,
    ranks: int | None,
    microbatches: int | None,
    minibatch: int | None,
    stages: int | None,
    replicas: str | None,
    memory: int | None,
    tiers: tuple[str, ...],
    what_if: str | None,
    html: str | None,
    output: str | None,
    as_json: bool,
    verbose: bool,
    **request: Any,
) -> None:
    """Find the best plan for a profile.

    GRAPH is a profile, as `penstock profile -o` writes it, or a graph.txt of PipeDream's. CLUSTER
    is a file (.toml or .json, see `penstock cluster`), or machines of the catalogue: 2xdgx-h100 are
    two hosts, 16xh100-sxm so many devices on their usual hosts (`penstock devices` has the names).
    By default it is the cores of this machine. One of them may be -, standard input.
    """
    if request["cost_model"] != "ring":
        refuse_useless(
            ["overlap"], f"{request['cost_model']} says itself how much of an exchange hides"
        )
    counts = replicas not in (None, "any")
    num_devices = _num_ranks(replicas) if replicas and counts else ranks
    there = load_cluster(cluster) if cluster else Cluster.local(num_devices)
    if cluster and ranks is not None:
        there = _first_devices(there, ranks)
    if tiers:
        on_host = any(device.kind == "cpu" for device in there.devices)
        timed = [measured_tier(_tier(name), computes_on_host=on_host) for name in tiers]
        there = replace(there, tiers=(*there.tiers, *timed))
    request |= {
        "microbatches": microbatches,
        "minibatch": minibatch,
        "stages": stages,
        "memory_bytes": memory,
        "replicas": replicas,
    }
    profile = _read_graph(graph)
    if html is not None:
        refuse_useless(["what_if"], "--html shows what there is to choose from, without changes")
    if what_if is None:
        chosen = _chosen(profile, there, html, request)
        text = chosen.text(show.width(), details=verbose)
    else:
        changed = planner.what_if(what_if, profile, there, **request)
        chosen, text = changed.after, changed.text(show.width())
    write(output, ".json", chosen.save)
    if as_json:
        show.print_json(chosen)
    elif output != STANDARD_OUTPUT:
        show.echo(text)


def _chosen(
    profile: LayerGraph, cluster: Cluster, html: str | None, request: dict[str, Any]
) -> Plan:
    """The plan; where a page is asked for, that is written, too."""
    if html is None:
        return planner.plan(profile, cluster, **request)
    from penstock.drawing import draw  # for those who look at a page

    choices = planner.choices(profile, cluster, **request)
    write(html, ".html", lambda path: draw(choices, path))
    return choices.plan


def _tier(name: str) -> Tier:
    return Tier(kind="host") if name == "host" else Tier(folder=name)


def _first_devices(cluster: Cluster, count: int) -> Cluster:
    """The cluster with its first ``count`` devices only."""
    if not 1 <= count <= len(cluster.devices):
        raise click.BadParameter(f"there are {len(cluster.devices)} devices, not {count}")
    return only(cluster, range(count))


def _read_graph(path: str) -> LayerGraph:
    if suffix_of(path, ".txt") == ".txt":
        from penstock.interop.pipedream_profiles import parse_pipedream_graph

        return parse_pipedream_graph(text_of(path), title_of(path))
    return LayerGraph.from_json(text_of(path), where=title_of(path))
