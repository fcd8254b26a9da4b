"""Schedules as arrays: what the ops of a schedule are, need and send, in a few numpy calls.

``columns`` stores the ops and gives those of a rank as ops; ``needs`` reads the one dependency rule
for all ops at once and lets ranks go on as far as these allow, ``messages`` says what crosses
ranks. Nothing here knows checks, passes, families or searches, which are built on it.
"""
