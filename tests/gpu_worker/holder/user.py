"""A process with a pool: `python -m tests.gpu_worker.holder.user FOLDER BYTES [DEVICE MEMORY DEVICE_BYTES]`.

Takes a new pool, writes its own number to it, says which pool it has, and waits. With a device, MEMORY is the file that
stands for the memory of a pool of 77 pages on it. `take POOL_ID`, in the place of BYTES, asks for a pool that is there,
and prints the refusal.
"""

import mmap
import os
import signal
import sys
from pathlib import Path

from gpu_worker.shared_pool.messages import HolderClient, HolderError

NUM_PAGES = 77


def main() -> None:
    """See the module's docstring."""
    client, what, *more = HolderClient(Path(sys.argv[1])), *sys.argv[2:]
    if what == "take":
        try:
            client.take(bytes.fromhex(more[0]), 1)
        except HolderError as refused:
            print(refused, flush=True)
        return
    pool, header = client.create(int(what), device=more[0], pages=NUM_PAGES) if more else client.create(int(what))
    content = mmap.mmap(header, 0)
    content[:8] = os.getpid().to_bytes(8, "little")
    if more:
        client.attach(pool, os.open(more[1], os.O_RDWR), int(more[2]))
    print(f"has {pool.hex()}", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
