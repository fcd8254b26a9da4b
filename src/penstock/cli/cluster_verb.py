"""``penstock cluster`` and ``penstock measure-cluster``: devices, and how fast they are joined."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, get_args

import click

from penstock.base.errors import DeadlineError, InputError, RunError
from penstock.base.units import picture_bytes, picture_seconds
from penstock.cli import options, show
from penstock.cli.input import InputFile, load_cluster
from penstock.cli.output import STANDARD_OUTPUT, write
from penstock.core.cluster import Cluster, Link
from penstock.core.cluster.measured import differences
from penstock.core.cluster.parts import DeviceKind
from penstock.drawing.inputs import cluster_tables, link_cells

if TYPE_CHECKING:
    from penstock.engine.transport.link_meter import Measurement

_HOW = (
    "start it under torchrun, for example `torchrun --nproc-per-node 4 --no-python penstock "
    "measure-cluster -o cluster.json`, or measure processes of this machine with --ranks 4"
)
_OTHERS_SECONDS = 5.0
"""How long the others may take to say why they end, once one has failed."""


@click.command()
@click.argument("file", type=InputFile("Cluster"), required=False)
@options.ranks_option(None)
@options.choice_option(
    "--kind", among=get_args(DeviceKind),
    help="Cores (the default) or accelerators of this machine.",
)  # fmt: skip
@options.output_option("Where to write the cluster (.json).")
@options.json_option
def cluster(
    file: str | None, ranks: int | None, kind: DeviceKind | None, output: str | None, as_json: bool
) -> None:
    """Show a cluster: this machine's devices, or those in FILE.

    FILE is .toml or .json, or -, standard input; or the name of machines of the catalogue, as
    8xdgx-h100.
    """
    if file is not None and (ranks is not None or kind is not None):
        raise InputError("--ranks and --kind are about this machine; leave them or FILE out")
    chosen = load_cluster(file) if file is not None else Cluster.local(ranks, kind or "cpu")
    write(output, ".json", chosen.save)
    if as_json:
        show.print_json(chosen)
    elif output != STANDARD_OUTPUT:
        _print_cluster(chosen)


@click.command("measure-cluster")
@options.count_option(
    "-p", "--ranks", least=2,
    help="Measure between so many processes of this machine, without torchrun.",
)  # fmt: skip
@click.option(
    "--backend",
    help="Of torch.distributed; default: that of the accelerators if there are any, else gloo.",
)  # fmt: skip
@options.amount_option(
    "--seconds", default=1.0,
    help="About how long to measure each pair of ranks.",
)  # fmt: skip
@options.count_option(
    "--most-pairs", default=66,
    help="If there are more pairs, measure neighbours only: on each host, and from host to host.",
)  # fmt: skip
@options.amount_option(
    "--deadline", default=60.0,
    help="Seconds that a rank may take to come, or to answer.",
)  # fmt: skip
@click.option(
    "--against", type=InputFile("Cluster"),
    help="Warn of what differs from this cluster (.toml, .json, dgx-h100) by over 30 %.",
)  # fmt: skip
@options.output_option("Where to write the cluster (.json).")
@options.json_option
def measure_cluster(
    ranks: int | None,
    backend: str | None,
    seconds: float,
    most_pairs: int,
    deadline: float,
    against: str | None,
    output: str | None,
    as_json: bool,
) -> None:
    """Measure the links between the processes of a job, and write the cluster they make.

    Times messages of several sizes between every pair of ranks, fits latency and bandwidth, and
    compares an all-reduce with what they predict. Run it under torchrun, with as many processes as
    there will be ranks.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        if ranks is None:
            raise InputError(f"nothing is measured by one process alone; {_HOW}")
        _start_here(ranks, deadline)
        return
    if ranks not in (None, int(os.environ["WORLD_SIZE"])):
        raise InputError("under torchrun, --nproc-per-node says how many ranks; leave --ranks out")
    written_cluster = None if against is None else load_cluster(against)
    with _process_group(backend, deadline) as rank:
        from penstock.engine.transport.link_meter import measure_cluster as measure

        counting = show.counting("measuring links") if rank == 0 else nullcontext(None)
        with counting as progress:
            measurement = measure(
                most_pairs=most_pairs,
                seconds_per_pair=seconds,
                deadline_seconds=deadline,
                progress=progress,
            )
        if rank == 0:
            _report(measurement, output, as_json)
            if written_cluster is not None and against is not None:
                links = {pair: fit.link for pair, fit in measurement.fits.items()}
                for words in differences(measurement.cluster, written_cluster, links, against):
                    show.warn(words)


@contextmanager
def _process_group(backend: str | None, deadline_seconds: float) -> Iterator[int]:
    """torch's default group while it is needed; yields this process's rank."""
    import torch
    import torch.distributed as dist

    from penstock.engine.device.accelerators import (
        HOST_BACKEND,
        accelerators,
        backend_of_accelerators,
        is_of_accelerators,
    )

    chosen = backend or backend_of_accelerators() or HOST_BACKEND
    if not dist.is_backend_available(chosen):
        raise InputError(f"this torch has no backend {chosen!r}; {HOST_BACKEND} is always there")
    if is_of_accelerators(chosen):
        local_rank, here = int(os.environ.get("LOCAL_RANK", "0")), accelerators()
        if local_rank >= len(here):
            raise InputError(
                f"rank {os.environ['RANK']} is process {local_rank} of its host, which has "
                f"{len(here)} accelerators; start one process for each, or --backend "
                f"{HOST_BACKEND}"
            )
        torch.accelerator.set_device_index(local_rank)
    torch.set_num_threads(1)
    try:
        dist.init_process_group(chosen, timeout=timedelta(seconds=deadline_seconds))
    except (RuntimeError, ValueError) as error:
        first_line = str(error).partition("\n")[0]
        raise DeadlineError(
            f"rank {os.environ['RANK']} did not meet the others within {deadline_seconds:g} s: "
            f"{first_line}"
        ) from None
    try:
        yield dist.get_rank()
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _start_here(num_ranks: int, deadline_seconds: float) -> None:
    """Run this very command in processes of this machine, and end when they have."""
    import torch.distributed as dist

    # Whoever serves the store chooses its port, so that two measurements never take the same.
    wait = timedelta(seconds=deadline_seconds)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=wait
    )
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(num_ranks),
        # torch's own name for: somebody else serves the store.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "penstock", *sys.argv[1:]],
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(num_ranks)
    ]
    try:
        failed = _first_failure(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if failed is not None:
        raise RunError(f"rank {failed[0]} ended with exit code {failed[1]}; nothing was written")


def _first_failure(processes: list[subprocess.Popen[bytes]]) -> tuple[int, int] | None:
    """(rank, exit code) of who failed first; ``None`` when all have ended well."""
    while True:
        for rank, process in enumerate(processes):
            if process.poll():
                _wait_for_all(processes)
                return rank, process.returncode
        if all(process.returncode == 0 for process in processes):
            return None
        _pause(processes)


def _wait_for_all(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        try:
            process.wait(_OTHERS_SECONDS)
        except subprocess.TimeoutExpired:
            return


def _pause(processes: list[subprocess.Popen[bytes]]) -> None:
    running = next(process for process in processes if process.returncode is None)
    try:
        running.wait(0.1)
    except subprocess.TimeoutExpired:
        return


def _report(measurement: Measurement, output: str | None, as_json: bool) -> None:
    if as_json:
        show.print_json(_numbers(measurement))
    elif output != STANDARD_OUTPUT:
        _print_measurement(measurement)
    write(output, ".json", measurement.cluster.save)


def _numbers(measurement: Measurement) -> dict[str, object]:
    names = [device.name for device in measurement.cluster.devices]
    return {
        "cluster": measurement.cluster,
        "links": [
            {"between": [names[a], names[b]], **_fields(fit.link), "fit_error": fit.error}
            for (a, b), fit in measurement.fits.items()
        ],
        "all_reduces": [total._asdict() for total in measurement.sums],
    }


def _fields(link: Link) -> dict[str, float]:
    return {"latency_seconds": link.latency_seconds, "bytes_per_second": link.bytes_per_second}


def _print_measurement(measurement: Measurement) -> None:
    names = [device.name for device in measurement.cluster.devices]
    rows = [
        (f"{names[a]} – {names[b]}", *link_cells(fit.link), f"{fit.error:.0%}")
        for (a, b), fit in measurement.fits.items()
    ]
    show.print_table(("pair", "latency", "bandwidth", "fit error"), rows)
    show.echo()
    sums = [
        (
            picture_bytes(total.num_bytes),
            picture_seconds(total.measured_seconds),
            picture_seconds(total.predicted_seconds),
            f"{total.predicted_seconds / total.measured_seconds - 1:+z.0%}",
        )
        for total in measurement.sums
    ]
    show.print_table(("all-reduce of", "measured", "as a ring", "difference"), sums)
    show.echo()
    _print_cluster(measurement.cluster)


def _print_cluster(cluster: Cluster) -> None:
    for number, table in enumerate(cluster_tables(cluster)):
        if number:
            show.echo()
        show.print_table(*table)
    if cluster.assumed:
        show.warn(cluster.assumed)
