"""Carries out the core's effects: sends frames to workers and front ends, writes the log and the steps file.

Owns the list of peers that could not be reached until they are reported to the core. Decides nothing.
"""

import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence

from tandem.internal.v1 import frontend_pb2, worker_pb2

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages.reports import StepReport
from scheduler_svc.door.tls_files import ReadyCommand
from scheduler_svc.processes.workers import WorkerProcesses
from scheduler_svc.recording.steps_file import StepsFile
from scheduler_svc.shell.router_link import PeerLostError, RouterLink
from scheduler_svc.shell.served_model import ServedModel
from scheduler_svc.shell.worker_links import WorkersLink
from scheduler_svc.wire import frontend as frontend_wire
from scheduler_svc.wire import worker as worker_wire
from scheduler_svc.wire.constraints import order_frame
from scheduler_svc.wire.weights import load_frame
from tandem_contract.logs import announce

log = logging.getLogger("tandem.core")


class EffectDispatcher:
    """`lost_peers` has (link, peer, reason), the oldest first."""

    def __init__(
        self,
        *,
        workers: WorkersLink,
        frontends: RouterLink,
        served_model: ServedModel,
        worker_processes: WorkerProcesses,
        steps: StepsFile | None,
        listen: Callable[[], str],
        joined: Callable[[], Collection[str]],
        ready: ReadyCommand,
    ) -> None:
        """`listen` returns the address that callers reach, `joined` the workers that the core has accepted.

        `ready` makes the command that tries the service.
        """
        self._was_ready = False
        self._workers = workers
        self._listen = listen
        self._ready = ready
        self._joined = joined
        self._frontends = frontends
        self._served_model = served_model
        self._worker_processes = worker_processes
        self._steps = steps
        self.lost_peers: deque[tuple[WorkersLink, str, str]] = deque()

    def answer_worker(self, effects: list[fx.Effect], join: worker_pb2.Join | None = None) -> list[fx.Effect]:
        """Answers a worker's message at once; returns the other effects. `join` is set if the message was a Join.

        The worker's next message may come in the same turn, and answers must be sent in the order of the messages: a
        Rejoin that answers a message before the Join would undo the Join if it were sent after Joined.
        """
        rest: list[fx.Effect] = []
        for effect in effects:
            match effect:
                case fx.WorkerAccepted():
                    assert join is not None, "the core accepted a worker that sent no Join"
                    self._served_model.joined(effect.worker, join, self._joined())
                    log.info(
                        "worker %s joined with %s on %s (%s): %d pages of %d, %d rows",
                        effect.worker, join.model, join.device, join.dtype,
                        join.num_pages - 1, join.page_size, join.max_rows,
                    )  # fmt: skip
                    self._workers.limit_frames(effect.worker, join.max_frame_bytes)
                    self._worker_processes.joined(effect.worker, join.pid)
                    self.send(
                        self._workers, effect.worker, worker_wire.joined_frame(effect, self._address(effect.worker))
                    )
                case fx.WorkerProven():
                    self._proven(effect)
                case fx.WorkerRefused() | fx.AskRejoin():
                    self._turn_away(effect)
                case _:
                    rest.append(effect)
        return rest

    def dispatch(self, effects: list[fx.Effect]) -> None:
        """Carries out effects, those for workers first, so that no device waits while text is sent to front ends.

        Each front end gets one frame, because a frame costs it and the core a wake-up.
        """
        later: dict[str, list[frontend_wire.FrontendEffect | fx.ModelServed]] = {}
        reports: list[StepReport] = []
        for effect in effects:
            match effect:
                case fx.SendPlan():
                    self.send(self._workers, effect.worker, worker_wire.plan_frame(effect.plan))
                case fx.PrepareConstraint() | fx.DropConstraint():
                    self.send(self._workers, effect.worker, order_frame(effect))
                case fx.WorkerProven():
                    self._proven(effect)
                case fx.WorkerRefused() | fx.AskRejoin():
                    self._turn_away(effect)
                case fx.LoadWeights():
                    self.send(self._workers, effect.worker, load_frame(effect))
                case fx.DismissWorker():
                    self.send(self._workers, effect.worker, worker_wire.dismissed_frame())
                case fx.KillWorker():
                    self._worker_processes.kill(effect.worker)
                case fx.Note():
                    log.warning("%s", effect.message)
                case StepReport():
                    reports.append(effect)
                case fx.Detached() | fx.Forgotten() | fx.WeightsChanged() | fx.StepOutput(frontend=""):
                    pass  # Only a journal reads these.
                case fx.WorkerAccepted():
                    raise AssertionError(f"{effect} does not answer a worker's message")
                case _:
                    later.setdefault(effect.frontend, []).append(effect)
        for frontend, of_frontend in later.items():
            self.send(self._frontends, frontend, self._frontend_frame(of_frontend))
        if self._steps is not None:
            for report in reports:
                self._steps.add(report)
            self._steps.write_due()

    def send(self, link: WorkersLink, peer: str, frame: bytes) -> None:
        """Sends a frame, or adds the peer to `lost_peers` if it cannot be reached."""
        try:
            link.send(peer, frame)
        except PeerLostError as error:
            self.lost_peers.append((link, peer, str(error)))

    def _proven(self, effect: fx.WorkerProven) -> None:
        self._served_model.proven(effect.worker)
        if effect.was_standby:
            self.send(self._workers, effect.worker, worker_wire.seated_frame())

    def _turn_away(self, effect: fx.WorkerRefused | fx.AskRejoin) -> None:
        if isinstance(effect, fx.AskRejoin):
            frame = worker_wire.rejoin_frame()
        else:
            frame = worker_wire.refused_frame(effect.reason, retry=effect.retry)
        self.send(self._workers, effect.worker, frame)

    def _frontend_frame(self, effects: Sequence[frontend_wire.FrontendEffect | fx.ModelServed]) -> bytes:
        if len(effects) == 1 and not isinstance(effects[0], fx.ModelServed):
            return frontend_wire.frame_of(effects[0])
        frame = frontend_pb2.CoreToFrontend()
        for effect in effects:
            message = frame.batch.messages.add()
            if isinstance(effect, fx.ModelServed):
                if effect.info is not None:
                    self._announce_ready()
                message.model_state.CopyFrom(self._served_model.state(effect))
            else:
                frontend_wire.fill(message, effect)
        return frame.SerializeToString()

    def _address(self, worker: str) -> str:
        """The address for the worker's own line, a command; empty if that needs more, or is for another host."""
        return self._listen() if self._ready.is_plain and not self._workers.host_of(worker) else ""

    def _announce_ready(self) -> None:
        """Logs a command that tries the service, once, when the first model is served."""
        if not self._was_ready:
            self._was_ready = True
            announce("ready: %s", self._ready.at(self._listen()))
