"""How tensors move between ranks: threads of one process, shared memory, or a process group."""

from penstock.transport.base import Edge, Noted, Transport
from penstock.transport.meeting import SharedMemoryExchange
from penstock.transport.process_group import ProcessGroupTransport
from penstock.transport.processes import ProcessTransport, Way, connect
from penstock.transport.shared_memory import SharedMemoryTransport
from penstock.transport.threads import ThreadExchange, ThreadTransport
from penstock.transport.wire import Codec

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
    "Way",
    "connect",
]
