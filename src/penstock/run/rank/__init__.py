"""One rank: what it does with its part of a schedule.

``program`` is that part, with all that is known before it runs; ``interpreter`` walks it, and
``worker`` has one function per kind of op. ``at_hand`` is the minibatch that is worked on, ``mail``
what passes between ops and ranks, ``observers`` who looks on, ``journal`` what was done when;
``updater`` makes weights of gradients, and ``undo`` takes an update back.

Decisions:

An error computed with weights on trust counts only if the verdict lets them stand. Until it is
read, a rank hands on a placeholder, so that all others get to where they read it.
"""
