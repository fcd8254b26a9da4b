"""Where things stand in the repository."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GOLDEN = ROOT / "tests" / "golden"
PIPEDREAM = ROOT / "tests" / "data" / "pipedream"
