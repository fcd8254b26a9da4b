"""Batch norms of which each member has some of the channels.

Statistics are those of whole channels over all rows, so they are what one device computes.
"""

from __future__ import annotations

from torch import nn

from penstock.tensor.membership import Member


class ChannelNorm(Member, nn.modules.batchnorm._BatchNorm):
    """Normalises the channels that a member has; parameters and statistics are parts, too."""
