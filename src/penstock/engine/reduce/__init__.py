"""Reducers: how the holders of the same weights come to one gradient, and all ranks to one norm.

A new way to sum starts at ``reducer``, the protocol that all ways keep to, and gets its name in
``sums``, which is what trains: which sums a rank takes part in, and when. By ``owners`` every
element is summed by one holder in the order of one device; in ``sharding`` the owner also updates
it, be it a holder or a parameter server, and in ``stale`` a server does so without waiting for all.
In which ``buckets`` gradients leave, and which shard of a bucket is whose, is said there; a
``GradientWatch`` tells when a gradient is complete. ``flat`` is for those who hand flat buffers to
somebody else: in ``delegated`` to owners of which some are spare machines (``core.summation``), or
to ``torch.distributed``; ``inside`` a host they are summed before. ``agreement`` is how all ranks
learn the norm of the whole model's gradients.

Decisions:

Weights with several holders (tied across stages, or copies of a stage) are a copy per rank. Each
hands in its gradients (``REDUCE``) and owns a shard of the sum, which it adds up in the order of
the ranks and hands to all; then all make the same update. With r holders of M bytes a rank sends
2(r−1)/r · M, as in a ring, and the bits are those of a loop over the ranks, which a ring's are not.
Between processes, the sum is made in buckets of neighbouring layers, so that links are busy while
the last backward still runs. Every holder owns a shard of every bucket: if whole buckets had one
owner each, only its link would be busy with them.
A parameter server is a rank of the job, behind those that run stages, and not a machine that
somebody else's program listens on: optimizers, schedulers and checkpoints are the user's code and
files, which every rank has, and a server elsewhere would have to be sent. What it may be late with
is decided by one server as gradients arrive (``core.summation.staleness``), and written down:
who replays the journal needs no clock.

A rank sums what it owns of all its shared weights before it waits for anyone's sum, so ranks may
come to their stages in any order.
"""
