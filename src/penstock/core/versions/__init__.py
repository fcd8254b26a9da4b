"""Weight-version policies: which weights each pass of each microbatch reads.

An asynchronous pipeline updates a stage while microbatches are in flight there. A policy says which
version of the weights a forward and its backward read, and so how many versions a stage must keep
and how old a gradient is when it is applied. Version v of a stage is what it has after v updates,
counted from the beginning of the stream.

================  =======================  ==============================  ====================
policy            forward reads            backward reads                  versions held
================  =======================  ==============================  ====================
``Flush``         t                        the same                        1
``Latest``        the newest               the newest                      1
``Stash``         the newest               the same as its forward         p−s
``VerticalSync``  max(0, k−(p−1))          the same                        p
``DoubleBuffer``  max(0, t−1)              the same                        2
``PipeMare``      the newest               the newest, less τ·δ with T2    1 (and δ with T2)
``Predict``       the newest, predicted    the newest (SpecTrain:          1
                                           predicted)
``Sideways``      the newest               the newest, through the newest  1
                                           activations
================  =======================  ==============================  ====================

k counts microbatches and t minibatches. At stage s of p, the newest is max(0, k−(p−1−s)) at the
forward of microbatch k, and k at its backward, where each microbatch is an update; under
``Sideways``, whose forwards run twice as far ahead, max(0, k−2(p−1−s)) and k.

Decisions:

A policy also says which activations a backward goes through: those of its own forward (``own``), or
those that the newest forward of its stage has left (``newest``). Ops are named after the frame
whose gradient it is, so that what an op waits for is the same under all policies. A schedule says
it, too, since a drawing has no policy; a test holds the two together.

Replicas take part in rounds by number. The n-th update of a stage on a rank is made of the n-th
hand-in of each of its ranks. Where the last round of a stream has no microbatch for a replica, its
ops are named after the one that it lacks. They sum over the same channels as everything else, in
the order of ranks, so that the sum has the same bits everywhere and in the replay.
"""

from __future__ import annotations

from penstock.core.versions.book import (
    Trace,
    VersionBook,
    check_policy,
    least_minibatch,
    place_of,
    rounds_of,
    trace,
    versions_read,
    weight_copies,
)
from penstock.core.versions.policies import (
    POLICIES,
    USUAL,
    DoubleBuffer,
    Flush,
    Latest,
    PipeMare,
    Place,
    Policy,
    Predict,
    Rates,
    Sideways,
    Stash,
    Updates,
    VerticalSync,
    rate_factor,
)

__all__ = [
    "POLICIES",
    "USUAL",
    "DoubleBuffer",
    "Flush",
    "Latest",
    "PipeMare",
    "Place",
    "Policy",
    "Predict",
    "Rates",
    "Sideways",
    "Stash",
    "Trace",
    "Updates",
    "VersionBook",
    "VerticalSync",
    "check_policy",
    "least_minibatch",
    "place_of",
    "rate_factor",
    "rounds_of",
    "trace",
    "versions_read",
    "weight_copies",
]
