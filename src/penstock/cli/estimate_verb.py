"""``penstock estimate``, ``devices`` and ``measure-device``: hardware that one may not have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from penstock.base.telling import Telling
from penstock.base.units import format_bytes, four_digits
from penstock.base.values import write_atomically
from penstock.cli import options, show
from penstock.cli.input import load_workload
from penstock.cli.model_verbs import WORKLOAD_HELP, parse_sizes, print_graph
from penstock.cli.output import STANDARD_OUTPUT, write
from penstock.core import catalogue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.core.catalogue import Figure, Hardware, HostSpec


@click.command(epilog=WORKLOAD_HELP)
@click.argument("workload")
@click.option(
    "--device", required=True, metavar="NAME",
    help="Short name (penstock devices), or a file that measure-device wrote.",
)  # fmt: skip
@options.microbatches_option(8)
@click.option("--sizes", callback=parse_sizes, help="Other microbatch sizes, in rows, as 2,4,8.")
@click.option(
    "--software", default="eager", show_default=True, metavar="NAME",
    help="How kernels run: eager, compiled, graph, megatron-core …",
)  # fmt: skip
@options.choice_option(
    "--arithmetic", among=["tf32", "fp8", "fp4"],
    help="Of matrix products; default: that of their dtypes.",
)  # fmt: skip
@options.choice_option(
    "--attention", among=["fused", "causal", "formula"], default="fused",
    help="Causal: dense masks are causal ones that nobody reads.",
)  # fmt: skip
@options.output_option("Where to write the estimate (.json).")
@options.json_option
@options.verbose_option("what splitting, recomputing and updating take.")
def estimate(
    workload: str,
    device: str,
    microbatches: int,
    sizes: tuple[int, ...],
    software: str,
    arithmetic: Any,
    attention: Any,
    output: str | None,
    as_json: bool,
    verbose: bool,
) -> None:
    """Estimate a model layer by layer on hardware of the catalogue, from shapes alone."""
    catalogue.device_named(device)
    catalogue.software_named(software)
    with Telling("estimating"):
        graph = load_workload(workload).estimate(
            microbatches,
            device=device,
            sizes=sizes,
            software=software,
            arithmetic=arithmetic,
            attention=attention,
        )
    write(output, ".json", graph.save)
    if as_json:
        show.print_json(graph)
    elif output != STANDARD_OUTPUT:
        print_graph(graph, verbose=verbose)


@click.command()
@click.argument("name", required=False)
@options.json_option
def devices(name: str | None, as_json: bool) -> None:
    """Show the catalogue of hardware: devices and hosts, or all of one of them with its sources.

    Numbers marked with ? have no source.
    """
    if name is not None:
        is_host = catalogue.names_a_host(name)
        entry = (
            catalogue.host_named(name) if is_host else catalogue.device_named(name, or_host=True)
        )
        _show_entry(entry, as_json)
        return
    if as_json:
        show.print_json(
            {
                "devices": list(catalogue.devices().values()),
                "hosts": list(catalogue.hosts().values()),
            }
        )
        return
    names = ("device", "memory", "bandwidth", "fp32", "bf16", "fp8", "usual host")
    show.print_table(names, [_device_row(entry) for entry in catalogue.devices().values()], 1)
    show.echo()
    rows = [
        (host.name, f"{host.devices} × {host.device}", host.title)
        for host in catalogue.hosts().values()
    ]
    show.print_table(("host", "devices", "what joins them"), rows, 3)
    show.prose(
        "\nTFLOP/s without sparsity; ? without a source. `penstock devices NAME` has the sources "
        "of a device or a host."
    )


def _device_row(entry: Hardware) -> tuple[str, ...]:
    peaks = entry.flops_per_second
    return (
        entry.name,
        _marked(format_bytes(entry.memory_bytes.value), entry.memory_bytes),
        _marked(
            f"{entry.memory_bytes_per_second.value / 1e9:.0f} GB/s", entry.memory_bytes_per_second
        ),
        *(_tera(peaks.get(dtype) or peaks.get(other)) for dtype, other in _SHOWN),
        entry.host or (f"like {entry.assumed_host}?" if entry.assumed_host else "–"),
    )


_SHOWN = (("fp32", ""), ("bf16", "fp16"), ("fp8", ""))


def _tera(figure: Figure | None) -> str:
    return "" if figure is None else _marked(four_digits(figure.value / 1e12), figure)


def _marked(text: str, figure: Figure) -> str:
    return f"{text}?" if figure.source == catalogue.UNSOURCED else text


def _show_entry(entry: Hardware | HostSpec, as_json: bool) -> None:
    if as_json:
        show.print_json(entry)
        return
    sources = catalogue.sources()
    show.echo(f"{entry.name}: {entry.title}")
    figures = list(entry.figures())
    if isinstance(entry, catalogue.Hardware):
        figures += _efficiencies(entry)
    rows = [
        (name, four_digits(figure.value), sources.get(figure.source, figure.source))
        for name, figure in figures
    ]
    show.print_table(("number", "value", "source"), rows, 1)


def _efficiencies(entry: Hardware) -> Sequence[tuple[str, Figure]]:
    curve = entry.efficiency.matmul
    largest = catalogue.Figure(max(share for _, share in curve.points), curve.source)
    return [
        ("matmul, most of the peak", largest),
        *(
            (name.replace("_", " "), value)
            for name in entry.efficiency.__struct_fields__
            if isinstance(value := getattr(entry.efficiency, name), catalogue.Figure)
        ),
    ]


@click.command("measure-device")
@click.option("--name", default="mine", show_default=True, help="Short name of the device.")
@click.option(
    "--seconds", type=click.FloatRange(min=0.001), default=0.05, show_default=True,
    help="How long to measure each size of each kernel.",
)  # fmt: skip
@options.output_option("Where to write it (.toml); default: standard output.")
def measure_device(name: str, seconds: float, output: str | None) -> None:
    """Describe this machine's CPU by microbenchmarks, as an entry of the catalogue.

    One thread, as a worker has by default. It takes about a minute.
    """
    from penstock.training.estimating.measured_device import measure_device as measure

    with show.counting("measuring kernels") as progress:
        entry = measure(name, seconds_per_point=seconds, progress=progress)
    text = catalogue.as_toml(entry)
    write(output or STANDARD_OUTPUT, ".toml", lambda path: write_atomically(path, text))
