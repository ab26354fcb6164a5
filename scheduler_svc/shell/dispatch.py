"""Carries the core's effects out: frames to workers and front ends, lines to the log and the steps' file.

Owns the list of peers that could not be reached, until the loop reports them to the core. Decides nothing.
"""

import logging
from collections import deque
from collections.abc import Callable, Collection

from tandem.internal.v1 import frontend_pb2, worker_pb2

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages.reports import StepReport
from scheduler_svc.logs import announce
from scheduler_svc.recording.steps_file import StepsFile
from scheduler_svc.shell.router_link import PeerLostError, RouterLink
from scheduler_svc.shell.served_model import ModelCard
from scheduler_svc.wire import frontend as frontend_wire
from scheduler_svc.wire import worker as worker_wire

log = logging.getLogger("tandem.core")

# The client's default: a command needs no --address for it.
_DEFAULT_ADDRESS = "127.0.0.1:50051"


class Outlet:
    """`lost`: (link, peer, reason), oldest first."""

    def __init__(
        self,
        *,
        workers: RouterLink,
        frontends: RouterLink,
        card: ModelCard,
        steps: StepsFile | None,
        listen: Callable[[], str],
        joined: Callable[[], Collection[str]],
    ) -> None:
        """`listen` gives the address that callers reach, `joined` the workers that the core has accepted."""
        self._was_ready = False
        self._workers = workers
        self._listen = listen
        self._joined = joined
        self._frontends = frontends
        self._card = card
        self._steps = steps
        self.lost: deque[tuple[RouterLink, str, str]] = deque()

    def answer_worker(self, effects: list[fx.Effect], join: worker_pb2.Join | None = None) -> list[fx.Effect]:
        """Answers a worker's message, perhaps a Join, at once; returns the other effects.

        What it sent next may be in the same turn, and its answers must go out in the order of what they answer: after
        Joined, a Rejoin for something before that would undo it.
        """
        rest: list[fx.Effect] = []
        for effect in effects:
            match effect:
                case fx.WorkerAccepted():
                    assert join is not None, "a worker was accepted that did not join"
                    self._card.joined(effect.worker, join, self._joined())
                    log.info(
                        "worker %s joined with %s on %s (%s): %d pages of %d, %d rows",
                        effect.worker, join.model, join.device, join.dtype,
                        join.num_pages - 1, join.page_size, join.max_rows,
                    )  # fmt: skip
                    self._workers.limit_frames(effect.worker, join.max_frame_bytes)
                    self.send(self._workers, effect.worker, worker_wire.joined_frame(effect.generation, self._listen()))
                case fx.WorkerProven():
                    self._card.proven(effect.worker)
                case fx.WorkerRefused():
                    self._refuse(effect)
                case fx.AskRejoin():
                    self.send(self._workers, effect.worker, worker_wire.rejoin_frame())
                case _:
                    rest.append(effect)
        return rest

    def carry_out(self, effects: list[fx.Effect]) -> None:
        """Workers first: the device must not wait for anybody's text."""
        later: list[frontend_wire.FrontendEffect | fx.ModelServed] = []
        reports: list[StepReport] = []
        for effect in effects:
            match effect:
                case fx.SendPlan():
                    self.send(self._workers, effect.worker, worker_wire.plan_frame(effect.plan))
                case fx.WorkerRefused():
                    self._refuse(effect)
                case fx.AskRejoin():
                    self.send(self._workers, effect.worker, worker_wire.rejoin_frame())
                case fx.Note():
                    log.warning("%s", effect.message)
                case StepReport():
                    reports.append(effect)
                case fx.WorkerAccepted() | fx.WorkerProven():
                    raise AssertionError(f"{effect} answers a worker's message, and none came")
                case _:
                    later.append(effect)
        for effect in later:
            self.send(self._frontends, effect.frontend, self._frontend_frame(effect))
        if self._steps is not None:
            for report in reports:
                self._steps.add(report)
            self._steps.write_due()

    def send(self, link: RouterLink, peer: str, frame: bytes) -> None:
        """Sends, or remembers that the peer is lost."""
        try:
            link.send(peer, frame)
        except PeerLostError as error:
            self.lost.append((link, peer, str(error)))

    def _refuse(self, effect: fx.WorkerRefused) -> None:
        self.send(self._workers, effect.worker, worker_wire.refused_frame(effect.reason, retry=effect.retry))

    def _frontend_frame(self, effect: frontend_wire.FrontendEffect | fx.ModelServed) -> bytes:
        if not isinstance(effect, fx.ModelServed):
            return frontend_wire.frame_of(effect)
        if effect.info is not None:
            self._announce_ready()
        return frontend_pb2.CoreToFrontend(model_state=self._card.state(effect)).SerializeToString()

    def _announce_ready(self) -> None:
        """Logs once, when the first model is served, the command that tries the service."""
        if not self._was_ready:
            self._was_ready = True
            address = self._listen()
            flag = "" if address == _DEFAULT_ADDRESS else f" --address {address}"
            announce('ready: tandem generate%s "Return the"', flag)
