"""`python -m scheduler_svc`: the core in this process, the front ends in child processes.

Owns start and stop. A failed start ends with one line on stderr that has the cause and a remedy, and with exit code 2.
"""

import scheduler_svc.import_path  # noqa: F401  # pyright: ignore[reportUnusedImport]

# isort: split
import logging
import os
import secrets
import signal
import socket
import sys
import time
from contextlib import ExitStack, suppress

import zmq

from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.core.messages.page_hash import HASH_BYTES, root_name
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.door import tls_files
from scheduler_svc.door.tls_files import ReadyCommand, TlsFileError, TlsFiles
from scheduler_svc.door.token_file import TokenFile, TokenFileError
from scheduler_svc.journal.file import Sync
from scheduler_svc.journal.keeper import JournalKeeper, OpenedJournal
from scheduler_svc.metrics.listener import MetricsListener
from scheduler_svc.processes.address import ListenError, is_loopback, missing_flags
from scheduler_svc.processes.frontends import FrontendFailed, FrontendProcesses, FrontEndSettings
from scheduler_svc.processes.runtime_dir import RuntimeDir
from scheduler_svc.processes.workers import WorkerProcesses
from scheduler_svc.recording.recordings import Recordings, flight_dir
from scheduler_svc.remote import listener_of
from scheduler_svc.settings import PROGRAM, SchedulerSettings
from scheduler_svc.shell.dispatch import ServedModel
from scheduler_svc.shell.inbound import Credentials
from scheduler_svc.shell.links import RouterLink, WorkersLinks, with_remote
from scheduler_svc.shell.loop import Loop
from tandem_contract import logs, stopping
from tandem_contract.child import die_with_parent
from tandem_contract.files import KEY_NAME
from tandem_contract.logs import announce
from tandem_contract.needed import ends_with_needed
from tandem_contract.settings import SettingError, refused
from tandem_contract.stopping import StopRequests

log = logging.getLogger("tandem.core")

# Largest frames from peers: a Join carries the tokenizer, a Submit a prompt.
_WORKER_FRAME_BYTES, _FRONTEND_FRAME_BYTES = 128 << 20, 64 << 20
# Largest frame to a front end: a ModelState carries the tokenizer too.
_TO_FRONTEND_BYTES = 256 << 20


@ends_with_needed("scheduler_svc")
def main() -> int:
    """Runs the service. Returns 0 after SIGTERM or SIGINT, 2 for invalid settings, 1 for other failures."""
    stopping.begin()
    logs.open_closed_streams()
    failure: FrontendFailed | SettingError | None = None
    with ExitStack() as stack:
        try:
            settings = PROGRAM.read(sys.argv[1:], os.environ)
            if settings.exit_with_parent:
                die_with_parent()
            service = _Service(settings, stack)
        except (SettingError, ListenError) as error:
            setting = f": {error.setting}" if isinstance(error, ListenError) else ""
            return refused(f"scheduler_svc{setting}", error)
        logs.start("core", level=settings.log_level, log_format=settings.log_format, package="scheduler_svc")
        for line in PROGRAM.warnings(os.environ):
            log.warning("%s", line)
        try:
            service.run()
        except (FrontendFailed, SettingError) as error:
            failure = error
    if failure is not None:
        log.error("%s", failure)
        return 2 if isinstance(failure, SettingError) or failure.exit_code == 2 else 1
    log.info("stopped")
    stopping.end()
    return 0


class _Service:
    """The parts of the running process; `stack` closes them. No child process or socket exists before `run`."""

    def __init__(self, settings: SchedulerSettings, stack: ExitStack) -> None:
        """Checks everything that needs no socket. Raises SettingError, ListenError."""
        self._settings = settings
        self._stack = stack
        self._runtime_dir = RuntimeDir(settings.runtime_dir)
        try:
            tls = tls_files.check(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
            self._tokens = None if settings.tokens is None else TokenFile(settings.tokens)
        except (TlsFileError, TokenFileError) as error:
            raise SettingError(str(error)) from None
        self._ready = ReadyCommand(tls=tls, needs_tokens=settings.tokens is not None)
        self._children = FrontendProcesses(
            settings.frontends,
            _front_end_settings(settings, self._runtime_dir, tls),
            missing=missing_flags(has_tls=tls is not None, has_tokens=settings.tokens is not None),
        )
        self._remote = listener_of(settings.workers_listen, settings.workers_keys)
        self._metrics: MetricsListener | None = None
        if settings.metrics_listen:
            self._metrics = MetricsListener(settings.metrics_listen, tokens=self._tokens, tls=tls)
            stack.callback(self._metrics.close)
        self._journal: OpenedJournal | None = None
        if settings.journal is not None:
            self._journal = OpenedJournal(
                settings.journal, sync=Sync(settings.journal_sync), max_bytes=settings.journal_bytes, stack=stack
            )
        self._core_config = CoreConfig(
            max_waiting=settings.max_waiting,
            max_waiting_tokens=settings.max_waiting_tokens,
            step_timeout_seconds=settings.step_timeout_seconds,
            silence_timeout_seconds=settings.silence_timeout_seconds,
            max_worker_wait_seconds=settings.max_worker_wait_seconds,
            quarantine_seconds=settings.quarantine_seconds,
            predict_steps=True,
            prove_workers=True,
            report_steps=settings.steps is not None,
            report_detached=self._journal is not None,
            weights_folders=tuple(filter(None, settings.weights_folders.split(","))),
            first_generation=0 if self._journal is None else self._journal.first_generation,
            page_root="" if self._journal is None else root_name(self._journal.cache_root),
        )
        self._recordings = Recordings(settings, self._core_config, stack)

    def run(self) -> None:
        """Runs until the service has stopped. Raises FrontendFailed, SettingError."""
        runtime_dir = self._runtime_dir
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._stack.callback(context.destroy, 0)
        workers = self._link(context, runtime_dir.worker_endpoint, _WORKER_FRAME_BYTES)
        frontends = self._link(context, runtime_dir.frontend_endpoint, _FRONTEND_FRAME_BYTES, _TO_FRONTEND_BYTES)
        runtime_dir.sockets_bound(workers.bind_again, frontends.bind_again)
        stop_requests, wake = self._signals_and_news()
        self._stack.callback(self._children.stop)
        if self._metrics is not None:
            self._metrics.start()
            announce("metrics at %s", self._metrics.url)
        log.info("workers connect to %s", runtime_dir.worker_endpoint)
        with self._recordings.guarding(FrontendFailed):
            every = with_remote(workers, self._remote, max_frame_bytes=_WORKER_FRAME_BYTES, stack=self._stack)
            self._loop(every, frontends, wake).run(stop_requests)

    def _loop(self, workers: WorkersLinks, frontends: RouterLink, wake: socket.socket) -> Loop:
        settings, runtime_dir, journal = self._settings, self._runtime_dir, self._journal
        core = Scheduler(self._core_config)
        keeper = None
        if journal is not None:
            keeper = JournalKeeper(journal, core)
            self._stack.enter_context(journal.closing(keeper, time.monotonic))
        return Loop(
            core=core,
            workers=workers,
            frontends=frontends,
            children=self._children,
            credentials=Credentials(
                worker_key=runtime_dir.worker_key,
                key_path=runtime_dir.path / KEY_NAME,
                frontend_secret=self._children.secret,
            ),
            worker_processes=WorkerProcesses(os.getppid() if settings.exit_with_parent else None),
            watch=runtime_dir.watch,
            wake=wake,
            served_model=ServedModel(
                default_max_new_tokens=settings.default_max_new_tokens,
                max_waiting=settings.max_waiting,
                cache_root=secrets.token_bytes(HASH_BYTES) if journal is None else journal.cache_root,
            ),
            observers=self._recordings.observers,
            journal=keeper,
            tokens=self._tokens,
            grace_seconds=settings.grace_seconds,
            metrics=None if self._metrics is None else self._metrics.meter,
            ready=self._ready,
        )

    def _link(
        self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, received: int, sent: int = 64 << 20
    ) -> RouterLink:
        try:
            link = RouterLink(context, endpoint, max_frame_bytes=received, max_sent_bytes=sent)
        except zmq.ZMQError as error:
            path = endpoint.removeprefix("ipc://")
            raise SettingError(f"runtime_dir: the socket {path} cannot be created: {error.strerror}") from None
        self._stack.callback(link.close)
        return link

    def _signals_and_news(self) -> tuple[StopRequests, socket.socket]:
        """Returns the requests to stop, and a socket: signals and news of the front ends make it readable."""

        def on_news() -> None:
            # What the loop has not read yet wakes it too; after its end, threads of processes still call this.
            with suppress(OSError):
                woken.send(b"\0")

        wake, woken = socket.socketpair()
        wake.setblocking(False)
        woken.setblocking(False)
        for end in (wake, woken):
            self._stack.callback(end.close)
        requests = StopRequests()
        requests.listen()
        signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
        self._stack.callback(signal.set_wakeup_fd, -1)
        self._children.wake_with(on_news)
        return requests, wake


def _front_end_settings(settings: SchedulerSettings, runtime_dir: RuntimeDir, tls: TlsFiles | None) -> FrontEndSettings:
    return FrontEndSettings(
        endpoint=runtime_dir.frontend_endpoint,
        listen=settings.listen,
        health_listen=settings.health_listen,
        tls=tls,
        needs_tokens=settings.tokens is not None,
        max_message_bytes=settings.max_message_bytes,
        max_streams=settings.max_streams,
        grace_seconds=settings.grace_seconds,
        measures=bool(settings.metrics_listen),
        reflection=is_loopback(settings.listen) if settings.reflection is None else settings.reflection,
        response_template=settings.response_template,
        flight_dir=flight_dir(settings),
        log_level=settings.log_level,
        log_format=settings.log_format,
        log_requests=settings.log_requests,
        grpc_tuning=settings.grpc_tuning,
    )


if __name__ == "__main__":
    sys.exit(main())
