"""Estimate a model that nobody runs, on hardware that nobody has: ``estimate``.

A model is run on meta tensors, which have shapes and no values. Every operation that torch
dispatches becomes a kernel with flops and bytes (``operations``, ``counting``), whose seconds
``penstock.core.pricing`` knows. The passes are those that ``profile`` times, with a clock that
reads kernels instead of time; so an estimate is the same kind of value as a profile. Where torch
would choose other kernels on the device than on meta, ``substitutes`` does. ``blocks`` finds lists
of equal blocks, of which two are enough.
"""

from penstock.training.estimating.estimating import estimate

__all__ = ["estimate"]
