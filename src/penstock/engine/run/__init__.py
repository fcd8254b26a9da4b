"""Running a schedule on real stages: the interpreter, its workers, and who drives them.

Decisions:

Copies of modules follow the model before every step. Weights are copied: a change through
``.data`` leaves no trace, and a copy costs less than a drift. Buffers and the dictionaries of hooks
are the model's own objects, so what is registered at any time is in every copy. Attributes are the
copy's own, since a forward may keep something in them; what the caller sets between calls is set in
copies too.

What several stages or ranks hold, no forward may write: each would read what another order of
microbatches has left. Version counters tell after every forward, comparing values before weights
change tells what counts none (batch norm, ``.data``).

Ranks compare what they were given with messages that exist anyway. A digest (``run/digests``: the
call, the number of microbatches, digests of the data, autocast, the layers' modes) stands in the
fixed head of each value between stages and of each gradient that copies sum, where it costs no
description and no message of its own. Reports carry it too. Gradients on their way back have none:
without a flush they may be an earlier minibatch's. ``gather_state_dict`` sends its digest in the
place of every first message that a rank may wait for, so that one which trains meanwhile is told at
once; ranks that all gather discard these messages by their numbers.

Under torchrun, rank 0's plan and seed count. Every process may then profile and plan for itself in
the same script; the timings of their profiles differ, the plan does not.
"""
