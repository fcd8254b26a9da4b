"""Where to cut a chain of layers."""

from penstock.partition.chain import balance

__all__ = ["balance"]
