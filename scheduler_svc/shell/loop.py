"""The core's shell: sockets and clock outside, the pure scheduler inside.

Owns the order of one turn, and the times at which the service stops. Decides nothing.
"""

import logging
import math
import select
import socket
import time
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from tandem.internal.v1 import record_pb2

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.door.tls_files import ReadyCommand
from scheduler_svc.door.token_file import TokenFile
from scheduler_svc.journal.keeper import JournalKeeper
from scheduler_svc.metrics.core_meter import CoreMeter
from scheduler_svc.observer import Observer
from scheduler_svc.processes.frontends import FrontendProcesses
from scheduler_svc.processes.workers import WorkerProcesses
from scheduler_svc.shell.dispatch import EffectDispatcher, ServedModel
from scheduler_svc.shell.inbound import Credentials, Inbound
from scheduler_svc.shell.links import RouterLink, WorkersLinks, link_of
from scheduler_svc.wire import tenants as tenants_wire
from tandem_contract.plural import numbered
from tandem_contract.stopping import Asked, StopRequests

log = logging.getLogger("tandem.core")

# Front ends get this long to deliver the last answers, after the grace period and after a second signal.
_FAREWELL_SECONDS, _SHORT_FAREWELL_SECONDS = 5.0, 0.5


class Stop:
    """Begins with a signal, or when an operator drains the service. Asked to stop now, it is over at once."""

    def __init__(self, core: Scheduler, grace_seconds: float) -> None:
        self._core = core
        self._grace_seconds = grace_seconds
        self._farewell_seconds = _FAREWELL_SECONDS
        self._is_now = False
        self.deadline: float | None = None
        """When, on the core's clock, the live requests end; None before the stop has begun."""

    @property
    def has_begun(self) -> bool:
        """Whether the service takes no more requests."""
        return self.deadline is not None

    @property
    def ends(self) -> tuple[float, ...]:
        """When the live requests end, and then the time of the front ends for the last answers; () before the stop."""
        return () if self.deadline is None else (self.deadline, self.deadline + self._farewell_seconds)

    def begins(self, requests: StopRequests) -> bool:
        """Takes note of all requests to stop so far. Returns whether the first one has come since the last call."""
        core, now, is_first = self._core, time.monotonic(), False
        if self.deadline is None and (requests.asked or core.is_stop_wanted):
            is_first, self.deadline = True, core.stop_at or now + self._grace_seconds
        if core.stop_at is not None and self.deadline is not None:
            self.deadline = min(self.deadline, core.stop_at)
        if self.deadline is not None and not self._is_now and (requests.announce() or is_first):
            left, seconds = len(core.queue), max(0.0, self.deadline - now)
            # After an operator's drain the first signal changes nothing: it often follows, as after a preStop hook.
            second = "a second signal ends" if requests.asked else "one signal changes nothing, a second one ends"
            log.info(
                "stopping: new requests are refused; %s at most %.4g s to end; %s them at once",
                *(numbered(left, "running one", "have"), seconds, second),
            )
        if requests.asked == Asked.STOP_NOW and not self._is_now:
            log.warning("stopping now: %s as UNAVAILABLE", numbered(len(self._core.queue), "request", "end"))
            self.deadline, self._farewell_seconds, self._is_now = now, _SHORT_FAREWELL_SECONDS, True
        return is_first

    def is_over(self, *, with_farewell: bool) -> bool:
        """Returns whether the live requests must end; or whether the front ends have had time for the last answers."""
        seconds = self._farewell_seconds if with_farewell else 0.0
        return self.deadline is not None and time.monotonic() >= self.deadline + seconds


_IDLE_SECONDS = 0.25
# How often the front-end processes are checked though nothing came of them: for pauses and silence.
_WATCH_SECONDS = 0.05
# How often the loop checks what no socket reports: removed files, counts of dropped frames.
_CHECK_SECONDS = 1.0
# A socket learns of the end of a connection a moment after its monitor, so peers are probed for a second.
_PROBE_SECONDS, _PROBE_EVERY_SECONDS = 1.0, 0.005
# A turn that begins later than this after the one before it: the machine or this process was stopped meanwhile.
_PAUSE_SECONDS = 1.0
_RECORDED_TICK = record_pb2.Tick()


class _Measured(Observer):
    """Shows the metrics what they measure."""

    def __init__(self, meter: CoreMeter, core: Scheduler) -> None:
        self._meter, self._core = meter, core

    def arrived(self, now: float, event: ev.Event, entry: Mapping[str, Any]) -> None:
        if isinstance(event, ev.StepDone):
            self._meter.step_arrived(event, self._core)

    def turned(self, began: float) -> None:
        self._meter.turned(self._core, began)


class Loop:
    """Runs until a stop is requested and either no request is left or the grace period is over."""

    def __init__(
        self,
        *,
        core: Scheduler,
        workers: WorkersLinks,
        frontends: RouterLink,
        served_model: ServedModel,
        children: FrontendProcesses,
        worker_processes: WorkerProcesses,
        credentials: Credentials,
        watch: Callable[[], None],
        observers: Sequence[Observer],
        journal: JournalKeeper | None,
        tokens: TokenFile | None,
        grace_seconds: float,
        wake: socket.socket,
        metrics: CoreMeter | None = None,
        ready: ReadyCommand | None = None,
    ) -> None:
        """`wake` becomes readable when a signal arrives, because a signal alone does not end a poll, and when
        `children` are to be watched. `watch` is called about once a second. `journal` and `metrics` observe, too.
        """
        self._core, self._tokens, self._metrics, self._journal = core, tokens, metrics, journal
        measured = None if metrics is None else _Measured(metrics, core)
        self._observers = (*observers, *(one for one in (journal, measured) if one is not None))
        self._workers, self._frontends, self._links = workers, frontends, (*workers, frontends)
        self._dispatcher = EffectDispatcher(
            workers=workers,
            frontends=frontends,
            served_model=served_model,
            worker_processes=worker_processes,
            listen=lambda: children.listen,
            joined=lambda: core.lanes,
            ready=ready or ReadyCommand(),
        )
        self._inbound = Inbound(
            core=core,
            handle=self._handle,
            dispatcher=self._dispatcher,
            credentials=credentials,
            on_frontend_lost=self._frontend_lost,
            tokens=tokens,
            metrics=metrics,
        )
        self._children, self._worker_processes = children, worker_processes
        self._watch, self._wake = watch, wake
        self._watch_at = self._next_check_at = self._probe_at = self._probe_until = 0.0
        self._stop = Stop(core, grace_seconds)
        # Not a zmq.Poller, which asks libzmq about each socket several times per call.
        self._poller = select.poll()
        for fd in (*(fd for link in self._links for fd in (*link.fds, *link.monitor_fds)), wake.fileno()):
            self._poller.register(fd, select.POLLIN)

    def run(self, stop_requests: StopRequests) -> None:
        """Runs turns until the service has stopped."""
        self._dispatcher.dispatch(self._tenants_changed())
        if self._journal is not None:
            restored = self._journal.restore(self._handle, time.monotonic())
            self._dispatcher.dispatch(restored)
        turned_at = time.monotonic()
        while True:
            readable = self._wait()
            if self._wake.fileno() in readable:
                self._wake.recv(64)
                # Perhaps of a front end's process; its line would otherwise wait for the next event.
                self._watch_at = 0.0
            now = time.monotonic()
            # Before anything that another process has done which got the same signal.
            effects = self._begin_stop(stop_requests)
            self._find_lost_peers(readable, now)
            if now >= self._watch_at:
                self._watch_at = now + _WATCH_SECONDS
                self._children.watch(restart=not self._stop.has_begun)
            if is_check := now >= self._next_check_at:
                self._next_check_at = now + _CHECK_SECONDS
                self._check(now)
            effects += self._excuse_workers(now - turned_at)
            turned_at = now
            if self._tokens is not None and is_check and self._tokens.poll():
                effects += self._tenants_changed()
                self._inbound.send_tenants(list(self._core.frontends))
            effects += self._inbound.receive()
            effects += self._begin_stop(stop_requests)
            if self._stop.is_over(with_farewell=False):
                effects += self._handle(ev.DrainEnded(), drain_ended=record_pb2.DrainEnded())
            effects += self._handle(ev.Tick(), tick=_RECORDED_TICK)
            for observer in self._observers:
                observer.sending(time.monotonic())
            if self._journal is not None:
                effects = self._journal.described(effects)
            self._dispatcher.dispatch(effects)
            for observer in self._observers:
                observer.turned(now)
            has_work = len(self._core.queue) or self._dispatcher.lost_peers
            if self._stop.has_begun and not has_work and self._is_over():
                return

    def _begin_stop(self, requests: StopRequests) -> list[fx.Effect]:
        if not self._stop.begins(requests):
            return []
        return self._handle(ev.DrainStarted(), drain_started=record_pb2.DrainStarted())

    def _handle(self, event: ev.Event, **entry: Any) -> list[fx.Effect]:
        """Passes an event to the core now. `entry` has the event's fields in record.proto."""
        now = time.monotonic()
        for observer in self._observers:
            observer.arrived(now, event, entry)
        effects = self._core.handle(event, now)
        for observer in self._observers:
            observer.handled(now, event, effects)
        return effects

    def _tenants_changed(self) -> list[fx.Effect]:
        """Passes the limits of the token file to the core."""
        if self._tokens is None:
            return []
        event = ev.TenantsChanged(limits={tenant.name: tenant.limits for tenant in self._tokens.tenants})
        return self._handle(event, tenants_changed=tenants_wire.entry_of(event))

    def _excuse_workers(self, seconds: float) -> list[fx.Effect]:
        """Reports to the core if this process did not run: messages of workers may not have arrived meanwhile."""
        if seconds < _PAUSE_SECONDS:
            return []
        log.warning("the scheduler did not run for %.1f s; its workers get this time in addition", seconds)
        return self._handle(ev.Paused(seconds=seconds), paused=record_pb2.Paused(seconds=seconds))

    def _find_lost_peers(self, readable: Container[int], now: float) -> None:
        """Probes every known peer after any connection ended, because no link reports which peer it belonged to."""
        for link in self._links:
            if any(fd in readable for fd in link.monitor_fds) and link.has_disconnects():
                self._probe_until = now + _PROBE_SECONDS
        if self._probe_at <= now < self._probe_until:
            # Probes are spaced, because a peer that reads slowly must not be lost to a flood of them.
            self._probe_at = now + _PROBE_EVERY_SECONDS
            for link in self._links:
                workers = [worker for worker in self._core.lanes if link_of(worker, self._workers) is link]
                peers = list(self._core.frontends) if link is self._frontends else workers
                self._dispatcher.lost_peers += [(link, peer, why) for peer, why in link.unreachable(peers)]

    def _wait(self) -> Container[int]:
        """Waits until something can be read or is due; returns the descriptors that became readable."""
        seconds = self._timeout_seconds()
        if any(link.has_frames() for link in self._links):
            seconds = 0.0
        return [fd for fd, _ in self._poller.poll(math.ceil(seconds * 1e3))]

    def _timeout_seconds(self) -> float:
        """Returns the time until the loop has something to do even if no message arrives."""
        if self._dispatcher.lost_peers:
            return 0.0
        now = time.monotonic()
        until = now + _IDLE_SECONDS
        if (wake := self._core.next_wake()) is not None and wake < until:
            until = wake
        until = min([until, *(end for end in self._stop.ends if end > now)])
        if now < self._probe_until:
            until = min(until, self._probe_at)
        return max(0.0, until - now)

    def _check(self, now: float) -> None:
        self._watch()
        self._inbound.dropped.report(now)
        for link in self._workers:
            self._dispatcher.lost_peers += [(link, peer, why) for peer, why in link.check(self._core.lanes, now)]
        self._worker_processes.keep(self._core.lanes)
        for observer in self._observers:
            observer.checked(now)

    def _frontend_lost(self, frontend: str, reason: str, is_orderly: bool) -> None:
        if is_orderly:
            log.info("front end %s was asked to stop, and has left", frontend)
            return
        if self._stop.deadline is None:
            log.warning("front end %s was lost: %s", frontend, reason)
            if self._metrics is not None:
                self._metrics.frontend_deaths += 1
        self._children.kill(frontend)

    def _is_over(self) -> bool:
        """Stops the front ends once the core has no request; the loop refuses new ones until they have ended."""
        self._children.ask_to_stop()
        return not self._children.is_running or self._stop.is_over(with_farewell=True)
