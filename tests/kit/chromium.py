"""Headless Chromium, for tests of pages; ``None`` where a machine has none."""

from __future__ import annotations

import shutil
import subprocess

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


def dom_of(page, profile, *flags):
    """The elements of a page after its scripts have run.

    Args:
        page: path of the file.
        profile: a new folder.
    """
    command = [CHROMIUM, *_FLAGS, *flags, f"--user-data-dir={profile}", "--dump-dom"]
    done = subprocess.run(
        [*command, page.as_uri()], capture_output=True, text=True, timeout=300, check=True
    )
    return done.stdout
