"""``penstock serve``: what it needs, and what it refuses."""

from __future__ import annotations

import signal
import subprocess
import sys

from tests.kit.command_line import refused
from tests.kit.launch import ENVIRONMENT

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # to import it is an error
sys.argv = ["penstock", "serve", "--listen", "127.0.0.1:0", "--job", "demo"]
from penstock.cli import main
main()
"""


def test_it_needs_no_torch_and_ends_when_it_is_told():
    with subprocess.Popen(
        [sys.executable, "-c", WITHOUT_TORCH], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as server:
        assert server.stdout.readline().startswith("Serving job 'demo' on 127.0.0.1:")
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0


def test_beyond_this_machine_it_wants_a_secret(monkeypatch):
    monkeypatch.delenv("PENSTOCK_SECRET", raising=False)
    assert "set PENSTOCK_SECRET" in refused("serve", "--listen", "0.0.0.0")
    assert "is no address" in refused("serve", "--listen", "a:b")
