"""The front end's process: flags, logging, and an end that comes with the parent's.

Started by the scheduler service, which owns the settings; the flags are no interface for people.
"""

import argparse
import asyncio
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
# Said to the parent, which replaces a front end that hangs.
ALIVE, ALIVE_SECONDS = "frontend alive", 1.0
LOG_FORMAT = "%(asctime)s %(levelname)s frontend %(process)d: %(message)s"


def main() -> int:
    flags = parse_flags(sys.argv[1:])
    die_with_parent()
    logging.basicConfig(level=flags.log_level.upper(), format=LOG_FORMAT, stream=sys.stderr)
    # It says nothing of use, at every call.
    logging.getLogger("grpc").setLevel(logging.INFO)
    # One text at a time per thread is what the front end wants; read when the tokenizer is first used.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from scheduler_svc.address import ListenError
    from scheduler_svc.frontend.server import FrontEnd, Settings
    from scheduler_svc.frontend.streams import StreamLimits

    settings = Settings(
        endpoint=flags.endpoint,
        listen=flags.listen,
        share_port=flags.share_port,
        reflection=flags.reflection,
        max_message_bytes=flags.max_message_bytes,
        grace_seconds=flags.grace_seconds,
        limits=StreamLimits(),
    )

    async def serve() -> None:
        front_end = FrontEnd(settings)
        front_end.stop_on_signals()
        alive = asyncio.create_task(say_alive(front_end.stop))
        await front_end.run(lambda address: print(f"frontend listening on {address}", flush=True))
        alive.cancel()

    try:
        asyncio.run(serve())
    except ListenError as error:
        print(f"frontend: {error}", file=sys.stderr)
        return 2
    return 0


async def say_alive(on_deaf: Callable[[], None]) -> None:
    """From the event loop, so that one that stands still falls silent. `on_deaf` is called where nobody listens."""
    try:
        while True:
            await asyncio.sleep(ALIVE_SECONDS)
            print(ALIVE, flush=True)
    except OSError:
        on_deaf()


def parse_flags(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scheduler_svc.frontend", allow_abbrev=False)
    parser.add_argument("--endpoint", required=True, help="the core's socket, ipc://...")
    parser.add_argument("--listen", default="127.0.0.1:50051")
    parser.add_argument("--share-port", action="store_true", help="with other front ends of this service")
    parser.add_argument("--reflection", action="store_true")
    parser.add_argument("--max-message-bytes", type=int, default=4 * 1024 * 1024)
    parser.add_argument("--grace-seconds", type=float, default=30.0)
    parser.add_argument("--log-level", default="info", type=str.lower, choices=("debug", "info", "warning", "error"))
    return parser.parse_args(words)


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent dies, however that dies."""
    parent = os.getppid()
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # It may have died before the call.
    if os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main())
