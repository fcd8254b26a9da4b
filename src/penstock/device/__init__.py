"""What a device is asked: to keep freed memory, and how many bytes of activations live on it.

Decisions:

Activations are counted where autograd saves them, by unique storage; resident memory is off by a
factor of two. Finalizers only leave a note, since they may run in any thread.

Freed memory stays in the process (``allocator.py``): glibc is told not to return it between
microbatches. It is the one setting that outlives a ``Pipeline``; single-device runs and profiles
make it too, so that comparisons stay fair.
"""
