"""How tensors move between ranks: threads of one process, or a process group."""

from penstock.transport.base import Edge, Transport
from penstock.transport.process_group import ProcessGroupTransport
from penstock.transport.threads import ThreadExchange, ThreadTransport

__all__ = ["Edge", "ProcessGroupTransport", "ThreadExchange", "ThreadTransport", "Transport"]
