"""``python -m penstock``: for where the script ``penstock`` is not on the path."""

from penstock.cli import main

main()
