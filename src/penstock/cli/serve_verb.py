"""``penstock serve``: a machine that sums gradients for others. Alone in its file, it starts
without what plans and draws.
"""

from __future__ import annotations

import os
import signal
import threading

import click

from penstock.base.errors import InputError
from penstock.cli import show

_SECRET_HELP = (
    "The secret is what PENSTOCK_SECRET says, here and on every worker. It is needed wherever "
    "another machine can connect. Nothing is encrypted: use a network that you trust."
)


@click.command(epilog=_SECRET_HELP)
@click.option(
    "--job", default="job", show_default=True, metavar="NAME",
    help="Serve workers that name this job (PENSTOCK_JOB), and no others.",
)  # fmt: skip
@click.option(
    "--listen", default="127.0.0.1", show_default=True, metavar="HOST[:PORT]",
    help="Address to listen on; 0.0.0.0 for all of this machine's. The usual port is 5600.",
)  # fmt: skip
@click.option("--quiet", is_flag=True, help="Do not tell who comes and goes.")
def serve(job: str, listen: str, quiet: bool) -> None:
    """Sum gradients for workers of a job, until interrupted.

    For plans whose reducer is "servers" (docs/summation-servers.md). Needs no torch, and keeps
    nothing: if it ends, workers go on without it.
    """
    from penstock.core.summation.frames import is_loopback, key_of, parse_address

    host, port = parse_address(listen)
    secret = os.environ.get("PENSTOCK_SECRET", "")
    if not secret and not is_loopback(host):
        raise InputError(
            f"other machines may connect to {host}, so a secret is needed; set PENSTOCK_SECRET to "
            "the same words here and on every worker, or listen on 127.0.0.1"
        )

    from penstock.core.summation.server import SummationServer

    def tell(news: str) -> None:
        if not quiet:
            show.echo(f"penstock serve: {news}", err=True)

    server = SummationServer(host, port, key_of(secret, job), tell)
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    show.echo(f"Serving job {job!r} on {server.address[0]}:{server.address[1]}")
    ended.wait()
    server.close()
