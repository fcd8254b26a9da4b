"""Schedules as arrays: what the ops of a schedule are, need and send, in a few numpy calls.

``columns`` stores the ops and gives those of a rank as ops; ``needs`` reads the one dependency rule
for all ops at once, ``messages`` says what crosses ranks, ``walk`` lets ranks go on as far as they
can. Nothing here knows checks, passes, families or searches, which are built on it.
"""
