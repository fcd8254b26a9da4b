"""Memory that two processes share and that has no name.

It cannot outlive the processes that use it, however they end, and it is no file in ``/dev/shm``,
which is 64 MB in a container unless somebody asked for more.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys

from penstock.base.errors import RunError

_REMEDIES = {
    errno.EMFILE: "too many files are open: raise the limit (ulimit -n)",
    errno.ENFILE: "too many files are open on this host: raise fs.file-max",
    errno.EFBIG: "it is larger than this process may make a file: raise the limit (ulimit -f)",
}
_MORE_MEMORY = "use smaller microbatches, or give the container or machine more memory"


def allocate(num_bytes: int, rank: int, purpose: str) -> tuple[mmap.mmap, int]:
    """A new segment, and the file descriptor by which another process can map it, to be closed.

    All of it is there at once: a lack of memory is an error here, not a SIGBUS later.

    Args:
        rank: who asks, for errors.
        purpose: what for, for errors.

    Raises:
        RunError: there is no such memory here, or not enough.
    """
    if not hasattr(os, "memfd_create"):
        raise RunError(
            f"rank {rank}: {sys.platform} has no memfd_create, which shared memory needs; "
            "use transport='process-group'"
        )
    try:
        descriptor = os.memfd_create("penstock", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
            return _map(descriptor, num_bytes), descriptor
        except BaseException:
            os.close(descriptor)
            raise
    except OSError as error:
        raise _refused(error, num_bytes, rank, purpose) from error


def attach(descriptor: int, num_bytes: int, rank: int, purpose: str) -> mmap.mmap:
    """Map another process's segment; the descriptor is closed.

    Raises:
        RunError: this process cannot map so much.
    """
    try:
        # Only what is really there may be mapped: touching anything behind it would be a SIGBUS.
        if not 0 < num_bytes <= os.fstat(descriptor).st_size:
            raise OSError(errno.EINVAL, "the segment is smaller than announced")
        return _map(descriptor, num_bytes)
    except OSError as error:
        raise _refused(error, num_bytes, rank, purpose) from error
    finally:
        os.close(descriptor)


def _map(descriptor: int, num_bytes: int) -> mmap.mmap:
    # Mapping all pages now takes a third of the time of one fault per page later.
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    if sys.version_info >= (3, 13):
        return mmap.mmap(descriptor, num_bytes, flags, trackfd=False)
    return mmap.mmap(descriptor, num_bytes, flags)


def _refused(error: OSError, num_bytes: int, rank: int, purpose: str) -> RunError:
    remedy = _REMEDIES.get(error.errno or 0, _MORE_MEMORY)
    return RunError(
        f"rank {rank} could not get {num_bytes:,} bytes of shared memory {purpose} "
        f"({error.strerror or error}); {remedy}, or use transport='process-group'"
    )
