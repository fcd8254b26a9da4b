"""One rank: what it does with its part of a schedule.

``program`` is that part, with all that follows from it before it runs. ``compiler`` binds each op
to what performs it, once per segment: a step of ``steps``, ``swapping`` or ``on_trust`` knows its
stage, its channels, its unit and who looks on. ``interpreter`` performs the steps on a ``work``,
which is one minibatch with its place in the stream, and writes down when. ``worker`` goes from
minibatch to minibatch. ``updater`` makes weights of gradients, when the protocol at hand says so:
one of ``protocols``, or of ``on_trust``.

Decisions:

An error computed with weights on trust counts only if the verdict lets them stand. Until it is
read, a rank hands on a poison value, so that all others get to where they read it.

Steps hold nothing that changes from one minibatch to the next, so a segment's steps are made once
and need not be asked which minibatch they are for: that is the work they are performed on. Whether
a minibatch trains is known when steps are bound, since evaluation reads the newest weights.

Between two kernels, what counts is how much code and data is touched, not how long it takes in a
loop: kernels have filled the processor's cache, and what runs once a microbatch or a step takes
five to ten times as long as when it runs again and again. So what can be known before is looked up
before, nothing is looked for that cannot have changed, and no library is called for a few numbers.
"""
