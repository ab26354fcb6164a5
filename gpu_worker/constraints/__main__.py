"""`python -m gpu_worker.constraints`: the mask server's process, which a worker starts.

It loads the tokenizer once (`tandem_contract/fork_server.py`). Its child serves the worker (`server.py`), and is killed
if a matcher takes too long. Imports no torch.
"""

import gpu_worker.process.import_path  # noqa: F401

# isort: split
import socket
import sys
from collections.abc import Callable
from typing import Any

from gpu_worker.constraints.frames import SharedArea, Sizes
from tandem_contract.fork_server import serve_forks
from tandem_contract.needed import ends_with_needed


def load(given: dict[str, Any]) -> Callable[[socket.socket], None]:
    """Returns what serves one worker. Raises what llguidance raises."""
    from gpu_worker.constraints.matchers import Matchers
    from gpu_worker.constraints.server import MaskServer
    from tandem_contract.grammars import constraint_tokenizer, slowness

    sizes, eos = Sizes(**given["sizes"]), given["eos"]
    area, slow = SharedArea(given["memory"], sizes), slowness()
    matchers = Matchers(constraint_tokenizer(given["tokenizer"].decode(), sizes.vocab_size, eos), eos_token_ids=eos)
    return lambda connection: MaskServer(connection, area, matchers, slow).serve()


if __name__ == "__main__":
    with ends_with_needed("gpu_worker.constraints"):
        sys.exit(serve_forks(load))
