"""How tensors move between ranks: threads of one process, shared memory, or a process group.

Decisions:

One message per hand-over. A block of bytes carries its own description, so shapes may change at any
time and no dry run is needed. It is strict data (``transport/wire``), never pickled: a message can
name only classes that this process has named. Both ends remember an edge's last layout, and only a
new one is read; both ends of a gloo channel remember its largest block, and a larger one is
announced first. Under threads, tensors are handed over as they are.

Shared memory has no name. Segments are memfds passed over Unix sockets, so nothing is left however
a process ends, and a small ``/dev/shm`` does not matter. The sender copies once; the receiver's
tensors lie in the slot, which is the sender's again when the last of them is dropped: memory
follows what is in flight. A ring in shared memory tells what was sent (on x86-64; elsewhere Python
has no fence for it), and who waits looks at it for up to two milliseconds before it sleeps, if
every rank's threads have cores of their own. One socket per pair wakes who sleeps and carries all
other notices, and its end of file is how a killed rank is noticed.

Between hosts a receive stands on every used edge, since gloo sends only to who is ready; on one
host, where that costs more than it gives, it is posted when needed.

Tensors on accelerators go straight to the other rank's by the collective library that torch has
for them (``device_link``), beside the message, which stays in main memory: so nothing else had to
learn of a second way (failures, deadlines, seals, the numbers of messages). Pairs that no library
links go through pinned memory (``on_devices``). Who is linked is decided once, when ranks meet.

Ranks meet in the job's store before they can send messages. What they exchange while a pipeline is
built (plan, seed, hosts) is JSON, read strictly: nothing that arrives may run code. torch's store
waits without a deadline for most answers, so every question to it is asked in a thread that is left
behind. One meeting has a number, counted in the store itself, so nobody keeps state. A group of the
last pipeline is destroyed when all ranks have come to build the next one: earlier, and a connection
would end under a rank that still reads. Which groups are ours is noted beside torch's own list of
them, the one thing that is kept for the whole process.
"""

from penstock.engine.transport.base import Edge, Noted, Transport
from penstock.engine.transport.listener import SharedMemoryExchange
from penstock.engine.transport.process_group import ProcessGroupTransport
from penstock.engine.transport.processes import ProcessTransport, TransportKind, connect
from penstock.engine.transport.shared_memory import SharedMemoryTransport
from penstock.engine.transport.threads import ThreadExchange, ThreadTransport
from penstock.engine.transport.wire import Codec

__all__ = [
    "Codec",
    "Edge",
    "Noted",
    "ProcessGroupTransport",
    "ProcessTransport",
    "SharedMemoryExchange",
    "SharedMemoryTransport",
    "ThreadExchange",
    "ThreadTransport",
    "Transport",
    "TransportKind",
    "connect",
]
