"""What tells the channels between two ranks apart, and messages that are no microbatch's.

One list, so that no two mean the same. Tags below these are the chain's own, two per stage.
"""

from __future__ import annotations

REPORT_TAG = 1 << 20
AGREEMENT_TAG = REPORT_TAG + 1
END_TAG = REPORT_TAG + 2
STATE_TAG = REPORT_TAG + 3
ORDER_TAG = REPORT_TAG + 4
GROUP_TAG = REPORT_TAG + 5
"""What the members of a group exchange while they share a layer."""
SKIP_TAGS = 1 << 21
"""The first of them: two per skip."""
SHARED_TAGS = 1 << 22
"""The first of them: sixteen per purpose of a message and group of shared weights."""
RENEWED_TAGS = 1 << 24
"""The first of those of weights that were updated for others: sixteen per group of weights. It may
be in the next minibatch that they are awaited."""

FIRST_EXCHANGE = 1 << 60
"""Numbers of messages that belong to no microbatch: above those of all that do."""
