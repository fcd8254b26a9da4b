"""Four accelerators in software, stricter than hardware: ``emu:0`` to ``emu:3``.

A test that takes the fixture ``accelerator`` has four devices, and code under test meets them as
it meets GPUs: tensors with storages of their own, ``torch.accelerator``, ``torch.Stream`` and
``torch.Event``, pinned memory, generators, autocast, fused optimizers. The CPU computes every op
on the spot, by the kernel that it has for that op, so that a net trained on a device equals one
trained on the CPU to the bit. So nothing ever runs behind the host's back, and no numbers are
wrong for want of a wait. Instead the order is *proven*: each op tells a ledger which bytes it
reads and writes on which stream, and the ledger raises unless other streams' work on these bytes
is ordered before it. A missing wait is therefore found every time, and not once in a thousand
runs; the error names both ops, both streams, and the remedy.

    def test_a_writer_waits(accelerator):
        device, stream = torch.device("emu:1"), torch.Stream("emu:1")
        weight = torch.ones(3, device=device)
        with stream:
            weight.add_(1)  # raises: this stream is not behind the one that made the weight

What is caught:

- an op on tensors of two devices, or of a device and the host (scalars of the host are allowed);
- reading what another stream wrote, or writing what another stream wrote or reads, without an
  event or a wait in between; on memory that just was allocated, and between devices, too;
- a tensor that dies while another stream uses it: the next owner of its memory may be any
  allocation of the same stream, and raises when it writes, unless ``record_stream`` was called or
  the stream has waited by then;
- overwriting pinned memory before it was copied to a device, and writing where a copy to pinned
  memory is still to arrive: raised when the host next waits for that copy, at the latest when the
  test ends. Reading it too early gives NaN (or bytes of 0x7F, or true): values arrive when the
  host waits;
- ``query()`` taken for granted: an event or stream that the host has not waited for says no first,
  and yes when it is asked again;
- memory: bytes are counted by device, peaks are kept, a limit raises ``torch.OutOfMemoryError``,
  and what nobody has written is NaN;
- the host waiting for a value (``item``, ``cpu``, a copy that blocks, results whose size depends
  on values): counted by device (``accelerator.host_reads``), refused under
  ``accelerator.set_sync_debug_mode("error")``. Waits that were asked for are counted by
  themselves.

How long it would have taken is counted on request (``accelerator.set_pace``): with so many seconds
for a launch and for a kernel, when each stream was busy (``worked``), and how long hosts stood
still (``host_idle``). Nothing takes longer for it.

The rules are CUDA's: work of one stream is in order; a copy between devices runs on the source's
stream, which first waits for the destination's and is then waited for by it; a copy from pageable
memory is over when it returns; memory returns to the pool of the stream that it came from;
autograd runs a backward on the stream of its forward. Pool and order are checked at each op,
whether or not this run reuses memory. An access covers the bytes from its first element to its
last: two streams may write to two halves of a tensor, but not to its even and its odd columns.

Torch itself may be at fault. A backward that hands one gradient to two streams (that of a sum)
adds to it in place on one of them as soon as the node on the other has been called; nothing makes
the first stream wait for the second, and the ledger says so.

What cannot be caught, or does not work:

- work of the host itself: a CPU op or numpy that reads pinned memory too early gets NaN, and
  nobody raises; what the host overwrites with equal bytes is not noticed;
- a race between threads of the host. When one has waited for a stream, its work is done for all
  threads, also for those that nobody told;
- how long a kernel takes, fragmentation and rounding of allocations, workspaces of kernels, limits
  on streams;
- ranks in several processes that share device memory, graphs of a stream
  (``torch.accelerator.Graph``), collectives but sends and receives (`collectives.py`), sparse,
  nested and quantised tensors, ``torch.compile``, packed sequences.

Differences to the CPU remain where torch itself asks for the kind of device: without ``foreach``,
optimizers take it on accelerators alone, and NAdam's and ASGD's then round otherwise. Attention
between devices is refused by torch, in its own words, which do not name the op. Random numbers are
the CPU's, but every device draws for itself: ``torch.manual_seed`` gives all of them the same
ones.

How it is built: `device/` is the C++ that torch loads as its kind of device ``PrivateUse1``, of
which `ledger.h` has the idea, and `pace.h` that of its time; `building.py` compiles it on first use
(a minute) and keeps it under ``~/.cache/penstock``; `devices.py` registers it, `device_module.py`
is what becomes ``torch.emu``, `recurrent.py` keeps recurrent layers to the CPU's bits, and
`own_process.py` runs the tests, in a process of their own, and says why. Without a C++ compiler
they are skipped.
"""
