"""What the Join of a worker on another host may say: nothing that only means something on this host."""

import logging

from tandem.internal.v1 import worker_pb2

log = logging.getLogger("tandem.core")


def as_guest(join: worker_pb2.Join, worker: str) -> None:
    """Removes the process id, the shared pool and the key from the Join.

    A process with that id on this host is another one, so it is neither killed nor drained by its number. Memory that
    outlives the worker can be taken over on its own host only, and the core does not know which workers share a host.
    """
    if join.pool_id:
        log.warning("worker %s shares its KV pool; that is not used, because it runs on another host", worker)
    for field in ("pid", "pool_id", "pool_layout", "pool_bytes", "key"):
        join.ClearField(field)
