"""Sums of gradients as numbers and bytes: who sums how much, and the machines that do nothing else.

This room imports no torch: the planner asks it how long a sum takes, ``penstock serve`` runs on a
machine that has only numpy, and ``reduce`` lets ranks take part. It begins with ``split``, which
says how much of a sum each machine should make.

``staleness`` says which gradients an update gets where workers need not wait for the slowest;
``listener`` is what everybody who is called shares, and lets a server hear who has come first.

Decisions:

A sum is cut into parts, and every part has one owner, which adds what all workers have of it in the
order of the workers and hands the sum to all. A worker owns parts like any server: the thread that
receives and adds is the same in a training process and on a spare machine (``server``).

Servers keep nothing but the parts that are under way. Workers keep what they have handed in until
it is certain that nobody needs it (``exchange``), so a server that dies costs one more sum.

Over the network go headers of fixed size and plain numbers (``frames``): nothing that is received
can be anything else than a number that is added.
"""
