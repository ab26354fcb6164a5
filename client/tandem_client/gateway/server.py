"""One process of the gateway: its event loop, its socket, uvicorn, and its end; and the parent of several.

The parent starts a dead one again. Owns start and stop, certificates that follow changes of their files without a
restart, and of several processes the address and the table of their counters; the kernel spreads connections over them.
uvicorn reads HTTP; `app` answers it.
"""

import asyncio
import contextlib
import logging
import resource
import socket
import ssl
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import uvicorn
from uvicorn.loops.auto import auto_loop_factory
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from tandem_client.gateway.accepting import SEAT, Acceptor, Seat, Seats
from tandem_client.gateway.app import App, Gate
from tandem_client.gateway.metrics import Meter, table_bytes
from tandem_client.gateway.protocol import bounded
from tandem_client.gateway.service import Guard, Service
from tandem_client.gateway.settings import Settings
from tandem_contract.certificates import Followed
from tandem_contract.child import Program, python
from tandem_contract.logs import announce
from tandem_contract.needed import needed_task
from tandem_contract.processes import Heard, Policy, ServiceEnded, State, Supervisor, run_async
from tandem_contract.settings import SettingError
from tandem_contract.stopping import Asked, StopRequests

log = logging.getLogger("tandem.gateway")

LISTENING = "gateway listening on"
# Files that the process opens besides its connections.
_SPARE_FILES = 128
_BACKLOG = 2048

_MODULE = "tandem_client.gateway"
# How often a gateway that drains looks whether the service does too; first after a moment, because the service may have
# got the same signal.
_DRAIN_LOOK_SECONDS, _MOMENT_SECONDS = 0.25, 0.1
# For connections that end when no request is in work any more, or the grace is over.
_CLOSING_SECONDS = 1
# More than the processes need after their own grace.
_SPARE_SECONDS = 5.0
_POLICY = Policy(max_ends=5)
_LOOK_SECONDS = 1.0


def bind(settings: Settings) -> socket.socket:
    """Returns a socket that is bound and does not listen yet. Raises SettingError, also if the address is taken.

    Only the processes of one gateway (`--processes`) share an address.
    """
    host, _, port = settings.listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if settings.table is not None:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((host, int(port)))
        if settings.processes > 1:
            # Set after the bind, which was refused beside another gateway; the children bind beside this socket.
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError as error:
        bound.close()
        raise SettingError(
            f"listen: the gateway cannot listen on {settings.listen}: {error.strerror or error}; choose another with"
            " --listen (127.0.0.1:0 takes a free port)"
        ) from None
    return bound


def _url_of(settings: Settings, bound: socket.socket) -> str:
    return f"{'http' if settings.tls_cert is None else 'https'}://{_address_of(bound)}"


def _address_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def serve(settings: Settings, bound: socket.socket) -> int:
    """Serves until a stop is asked for, and then until open requests have ended or the grace is over; returns 0.

    Raises SettingError if the files of TLS cannot be used.
    """
    with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
        runner.run(_serve(settings, bound))
    return 0


async def check(settings: Settings) -> None:
    """Raises SettingError if the service answers, and the flags of TLS are not what it wants."""
    service = _service(settings)
    try:
        await Guard(service, settings).start()
    finally:
        await service.close()


def _service(settings: Settings) -> Service:
    try:
        return Service(settings.address, settings.service_tls_settings, health_address=settings.health_address or None)
    except (OSError, ValueError) as error:
        raise SettingError(f"TLS to the service (--service-ca, --service-cert, --service-key): {error}") from None


async def _serve(settings: Settings, bound: socket.socket) -> None:
    _allow_files(settings.max_connections)
    service = _service(settings)
    meter = Meter(settings.table, settings.row)
    guard = Guard(service, settings)
    address_connections, _ = settings.bounds_of_address
    seats = Seats(meter, max_connections=settings.max_connections, per_address=address_connections)
    app = App(settings, service, meter, guard, seats)
    server = _Server(_config(settings, app, seats), settings, seats, app.gate)
    background = list[asyncio.Task[object]]()
    try:
        await guard.start()
        of_service = (settings.service_ca, settings.service_cert, settings.service_key)
        files = [Followed(of_service, service.connect, log)]
        if (context := server.config.ssl) is not None and (certificate := settings.tls_cert) is not None:
            load = partial(_load, context, certificate, settings.tls_key)
            files.append(Followed((certificate, settings.tls_key), load, log))
        stopping = server.stop_when_asked(service)
        works = (guard.run(), _follow(files), stopping)
        background = [needed_task(work, work.__qualname__) for work in works]
        await server.serve(sockets=[bound])
    finally:
        for task in background:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*background)
        await service.close()
    log.info("stopped")


async def _follow(files: Sequence[Followed]) -> NoReturn:
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        for followed in files:
            followed.look()


def _load(context: ssl.SSLContext, certificate: Path, key: Path | None) -> None:
    """Lets a server's context show the certificate from now on. Raises OSError (SSLError too), ValueError."""
    # A pair that does not fit would leave the context with a half of it. An encrypted key would make OpenSSL ask.
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    context.load_cert_chain(certificate, key, password="")


class _Server(uvicorn.Server):
    """uvicorn's, with an acceptor of connections of our own."""

    def __init__(self, config: uvicorn.Config, settings: Settings, seats: Seats, gate: Gate) -> None:
        super().__init__(config)
        self._settings, self._seats, self._gate = settings, seats, gate
        self._requests = StopRequests()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leaves them to `stop_when_asked`: uvicorn would not listen any more after the first one."""
        yield

    async def stop_when_asked(self, service: Service) -> None:
        """Waits for a signal, then until no request is in work, and stops the server.

        While the service drains too, this gateway goes on to answer that it does, for the grace at most.
        """
        loop, requests, gate = asyncio.get_running_loop(), self._requests, self._gate
        while not requests.announce():
            gate.changed.clear()
            await gate.changed.wait()
        ends_at = loop.time() + self._settings.grace_seconds
        log.info(
            "stopping: new requests get 503; %d have at most %g s to end; a second signal ends them at once",
            gate.num_in_work,
            self._settings.grace_seconds,
        )
        gate.drains_since = time.time()
        seconds = _MOMENT_SECONDS
        while requests.asked != Asked.STOP_NOW and (left := ends_at - loop.time()) > 0:
            gate.changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(gate.changed.wait(), min(seconds, left))
            if not gate.num_in_work and not await service.drains():
                break
            seconds = _DRAIN_LOOK_SECONDS
        self.config.timeout_graceful_shutdown = _CLOSING_SECONDS
        self.force_exit = requests.asked == Asked.STOP_NOW
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._requests.listen_in(asyncio.get_running_loop(), self._gate.changed.set)
        await self.lifespan.startup()
        acceptors: Any = []
        for one in sockets or []:
            one.listen(_BACKLOG)
            acceptors.append(Acceptor(one, self._seats, self._protocol, self.config.ssl, self._settings))
            announce("%s %s", LISTENING, _url_of(self._settings, one))
        self.servers = acceptors
        self.started = True

    def _protocol(self, seat: Seat) -> asyncio.Protocol:
        make: Any = self.config.http_protocol_class
        return make(config=self.config, server_state=self.server_state, app_state={SEAT: seat})


def _config(settings: Settings, app: App, seats: Seats) -> uvicorn.Config:
    config = uvicorn.Config(
        app,  # pyright: ignore[reportArgumentType]
        http=bounded(AutoHTTPProtocol, seats, settings),
        loop="none",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=round(settings.idle_seconds),
    )
    config.load()
    if settings.tls_cert is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            _load(context, settings.tls_cert, settings.tls_key)
        except (OSError, ValueError) as error:
            raise SettingError(f"--tls-cert and --tls-key cannot be used: {error}") from None
        config.ssl = context
    return config


def _allow_files(max_connections: int) -> None:
    """Raises the limit of open files as far as allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max_connections + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def run(settings: Settings, bound: socket.socket, arguments: Sequence[str]) -> int:
    """Runs the processes until a stop is asked for; returns the status. `bound` keeps the address, also for a port 0.

    Raises SettingError.
    """
    asyncio.run(check(settings))
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-gateway-"))
            table = Path(folder) / "counters"
            table.write_bytes(bytes(table_bytes(settings.processes)))
        except OSError as error:
            raise SettingError(
                f"no temporary file can be written: {error.strerror}; set TMPDIR to a folder with room"
            ) from None
        flags = [
            *arguments,
            f"--listen={_address_of(bound)}",
            "--processes=1",
            f"--table={table}",
            "--exit-with-parent",
        ]
        return asyncio.run(_run(settings, supervisors_of(settings, flags, _url_of(settings, bound))))


def supervisors_of(settings: Settings, flags: Sequence[str], url: str) -> list[Supervisor]:
    num_listening = 0

    def hear(line: str) -> Heard:
        if LISTENING in line:
            return Heard.SERVES
        # Without a reader of the log the gateway goes on.
        with contextlib.suppress(OSError, ValueError):
            print(line, file=sys.stderr, flush=True)
        return Heard.WORDS

    def on_change(one: Supervisor) -> None:
        nonlocal num_listening
        if one.state == State.PAUSED or (one.ended is not None and one.ended.is_overdue):
            log.warning("%s", one.ended)
        elif one.state == State.SERVING:
            num_listening += 1
            # At the start when all listen, then after each restart.
            if num_listening >= settings.processes:
                announce("%s %s", LISTENING, url)

    def kept(row: int) -> Supervisor:
        program = Program(argv=python(_MODULE, *flags, f"--row={row}"), has_session=False)
        return Supervisor(f"gateway {row + 1}", lambda: program, _POLICY, hear=hear, on_change=on_change)

    return [kept(row) for row in range(settings.processes)]


async def _run(settings: Settings, supervisors: Sequence[Supervisor]) -> int:
    requests = StopRequests()

    def stop() -> None:
        for supervisor in supervisors:
            supervisor.stop(settings.grace_seconds + _SPARE_SECONDS)

    def on_signal() -> None:
        if requests.announce():
            stop()
        elif requests.asked == Asked.STOP_NOW:
            for supervisor in supervisors:
                supervisor.stop_now()

    async def keep(supervisor: Supervisor) -> None:
        try:
            await run_async(supervisor)
        except BaseException:
            # The others end with it.
            stop()
            raise

    requests.listen_in(asyncio.get_running_loop(), on_signal)
    faults = list(filter(None, await asyncio.gather(*map(keep, supervisors), return_exceptions=True)))
    for fault in faults:
        if not isinstance(fault, ServiceEnded):
            raise fault
        log.error("%s", fault)
        return 2 if fault.wrong_settings else 1
    log.info("stopped")
    return 0
