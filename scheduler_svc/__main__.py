"""`python -m scheduler_svc`: the core in this process, the front ends in children.

Owns start and stop, and nothing between.
"""

import logging
import secrets
import signal
import socket
import sys
import time
from pathlib import Path
from types import FrameType

import zmq

from scheduler_svc import config
from scheduler_svc.address import ListenError
from scheduler_svc.core.page_hash import HASH_BYTES
from scheduler_svc.core.scheduler import CoreConfig, Scheduler
from scheduler_svc.frontend_process import FrontendProcesses
from scheduler_svc.links import RouterLink
from scheduler_svc.loop import Loop
from scheduler_svc.model_card import ModelCard
from scheduler_svc.record import Recorder
from scheduler_svc.runtime_dir import RuntimeDir
from scheduler_svc.steps import StepsFile

log = logging.getLogger("tandem.core")

# A Join carries the tokenizer, a Submit a prompt.
_WORKER_FRAME_BYTES, _FRONTEND_FRAME_BYTES = 128 << 20, 64 << 20


def main() -> int:
    """Runs the service until SIGTERM or SIGINT; the exit code is 0 where it stopped in good order."""
    settings = config.load(sys.argv[1:])
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr
    )
    stops: list[float] = []

    def on_signal(signum: int, frame: FrameType | None) -> None:
        stops.append(time.monotonic())

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, on_signal)

    # A poll goes on after a signal; a readable socket ends it.
    wake, woken = socket.socketpair()
    wake.setblocking(False)
    woken.setblocking(False)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)

    runtime_dir = RuntimeDir(settings.runtime_dir)
    children = _children(settings, runtime_dir)
    core_config = CoreConfig(
        max_waiting=settings.max_waiting,
        max_waiting_tokens=settings.max_waiting_tokens,
        step_timeout_seconds=settings.step_timeout_seconds,
        silence_timeout_seconds=settings.silence_timeout_seconds,
        prove_workers=True,
        report_steps=settings.steps is not None,
    )
    recorder, steps = _recorder(settings, core_config), _steps_file(settings)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    workers = RouterLink(context, runtime_dir.worker_endpoint, max_frame_bytes=_WORKER_FRAME_BYTES)
    frontends = RouterLink(context, runtime_dir.frontend_endpoint, max_frame_bytes=_FRONTEND_FRAME_BYTES)
    loop = Loop(
        core=Scheduler(core_config),
        workers=workers,
        frontends=frontends,
        children=children,
        wake=wake,
        card=ModelCard(
            default_max_new_tokens=settings.default_max_new_tokens,
            max_waiting=settings.max_waiting,
            cache_root=secrets.token_bytes(HASH_BYTES),
        ),
        recorder=recorder,
        steps=steps,
        grace_seconds=settings.grace_seconds,
    )
    log.info("workers connect to %s", runtime_dir.worker_endpoint)
    try:
        loop.run(lambda: len(stops))
    finally:
        signal.set_wakeup_fd(-1)
        children.stop()
        workers.close()
        frontends.close()
        context.term()
        if recorder is not None:
            recorder.close()
        if steps is not None:
            steps.close()
        wake.close()
        woken.close()
    log.info("stopped")
    return 0


def _recorder(settings: config.SchedulerSettings, core_config: CoreConfig) -> Recorder | None:
    if settings.record is None:
        return None
    try:
        return Recorder(settings.record, core_config)
    except OSError as error:
        raise _cannot_make("record", settings.record, error) from None


def _steps_file(settings: config.SchedulerSettings) -> StepsFile | None:
    if settings.steps is None:
        return None
    try:
        return StepsFile(settings.steps)
    except OSError as error:
        raise _cannot_make("steps", settings.steps, error) from None


def _cannot_make(setting: str, path: Path, error: OSError) -> SystemExit:
    hint = "; nothing is overwritten, so another name is needed" if isinstance(error, FileExistsError) else ""
    return SystemExit(f"scheduler_svc: {setting}: cannot make {path}: {error.strerror}{hint}")


def _children(settings: config.SchedulerSettings, runtime_dir: RuntimeDir) -> FrontendProcesses:
    flags = _frontend_flags(settings, runtime_dir)
    try:
        return FrontendProcesses(settings.frontends, listen=settings.listen, flags=flags)
    except ListenError as error:
        raise SystemExit(f"scheduler_svc: listen: {error}") from None


def _frontend_flags(settings: config.SchedulerSettings, runtime_dir: RuntimeDir) -> list[str]:
    flags = {
        "--endpoint": runtime_dir.frontend_endpoint,
        "--max-message-bytes": settings.max_message_bytes,
        "--grace-seconds": settings.grace_seconds,
        "--log-level": settings.log_level,
    }
    listed = [str(word) for pair in flags.items() for word in pair]
    return [*listed, "--reflection"] if settings.reflection else listed


if __name__ == "__main__":
    sys.exit(main())
