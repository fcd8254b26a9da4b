"""Large schedules as arrays: what the rooms beside this one do op by op, in a few numpy calls.

``columns`` stores the ops, ``rank_ops`` gives those of a rank to whoever asks about them; ``needs``
reads the one dependency rule for all ops at once, ``messages`` says what crosses ranks, ``walk``
lets ranks go on as far as they can, ``proof`` is the check, ``passes`` adds ops.

Decisions:

Whoever has a large schedule asks here first, and goes op by op where the answer is no: here it is
found out whether a schedule is right, there what is wrong with it, and in which words. Nothing here
knows checks, passes, families or searches; how a family's orders become columns stands beside the
orders (``families.in_columns``). Only ``rank_ops`` can be imported without numpy, which small
schedules never load.
"""
