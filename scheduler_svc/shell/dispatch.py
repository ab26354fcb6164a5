"""Carries out the core's effects: sends frames to workers and front ends, and writes the log.

Owns the list of peers that could not be reached until they are reported to the core, and the served model as front ends
see it: the tokenizer, the files of chats and the root of page hashes. All workers of one core have the same identity,
which includes these files, so they are taken once, from the first worker that is proven. Sizes and defaults come from
the core with each ModelServed. Decides nothing.
"""

import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field

from tandem.internal.v1 import frontend_pb2, worker_pb2
from tandem.v1 import control_pb2, inference_pb2

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages.config import MAX_LOGPROBS, MAX_NUM_SAMPLES
from scheduler_svc.core.messages.reports import StepReport
from scheduler_svc.door.tls_files import ReadyCommand
from scheduler_svc.processes.workers import WorkerProcesses
from scheduler_svc.shell.links import PeerLostError, RouterLink, WorkersLinks, link_of
from scheduler_svc.wire import frontend as frontend_wire
from scheduler_svc.wire import worker as worker_wire
from tandem_contract.logs import announce
from tandem_contract.plural import numbered

# The fields that callers see as the worker reported them.
_SAME = (
    *("model", "identity", "vocab_size", "page_size", "eos_token_ids", "window", "sink_tokens"),
    *("max_length", "max_rows", "token_budget"),
)


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class ServedModel:
    """Has no tokenizer until a worker is proven."""

    # None: the rest of the context.
    default_max_new_tokens: int | None
    max_waiting: int
    # 32 random bytes that only front ends receive and that are never logged.
    cache_root: bytes
    # The tokenizer, whether there is one, and the files of chats.
    _files: frontend_pb2.ModelState | None = field(default=None, init=False)
    # A tokenizer takes tens of MB, so Joins are kept only until the first worker is proven.
    _on_probation: dict[str, worker_pb2.Join] = field(default_factory=dict[str, worker_pb2.Join], init=False)

    def joined(self, worker: str, join: worker_pb2.Join, workers: Collection[str]) -> None:
        """Keeps the Join of a worker that the core accepted; `workers` are all that have joined, this one included."""
        if self._files is not None:
            return
        self._on_probation = {name: kept for name, kept in self._on_probation.items() if name in workers}
        self._on_probation[worker] = join

    def proven(self, worker: str) -> None:
        """Takes the tokenizer of a worker that confirmed a step, if it is the first one."""
        join = self._on_probation.get(worker)
        if join is not None:
            self._files = frontend_pb2.ModelState(
                info=control_pb2.GetModelInfoResponse(has_tokenizer=bool(join.tokenizer_json)),
                tokenizer_json=join.tokenizer_json,
                chat_template=join.chat_template,
                chat_files=join.chat.SerializeToString(deterministic=True),
            )
            self._on_probation.clear()

    def state(self, effect: fx.ModelServed) -> frontend_pb2.ModelState:
        """Returns the message for a front end."""
        served = effect.info
        if served is None:
            return frontend_pb2.ModelState(ready=False)
        assert self._files is not None, "a model is served before a worker is proven"
        info = control_pb2.GetModelInfoResponse(
            **{name: getattr(served, name) for name in _SAME},
            num_pages=served.usable_pages,
            sampling_defaults=inference_pb2.SamplingParams(**asdict(served.defaults)),
            default_max_new_tokens=self.default_max_new_tokens,
            max_waiting=self.max_waiting,
            max_num_samples=min(MAX_NUM_SAMPLES, self.max_waiting),
            max_logprobs=min(MAX_LOGPROBS, served.vocab_size),
        )
        state = frontend_pb2.ModelState(
            ready=True,
            info=info,
            cache_root=self.cache_root,
            recent_max_length=effect.recent_max_length,
            constraint_refusal=effect.constraint_refusal,
            longest_sequence=served.longest_sequence,
        )
        state.MergeFrom(self._files)
        return state


log = logging.getLogger("tandem.core")


@dataclass(slots=True, kw_only=True, eq=False)
class EffectDispatcher:
    """`lost_peers` has (link, peer, reason), the oldest first."""

    workers: WorkersLinks
    frontends: RouterLink
    served_model: ServedModel
    worker_processes: WorkerProcesses
    # Returns the address that callers reach.
    listen: Callable[[], str]
    # Returns the workers that the core has accepted.
    joined: Callable[[], Collection[str]]
    # Makes the command that tries the service.
    ready: ReadyCommand
    lost_peers: deque[tuple[RouterLink, str, str]] = field(
        default_factory=deque[tuple[RouterLink, str, str]], init=False
    )
    _was_ready: bool = field(default=False, init=False)

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
                    self.served_model.joined(effect.worker, join, self.joined())
                    log.info(
                        "worker %s joined with %s on %s (%s): %s of %d, %s",
                        effect.worker, join.model, join.device, join.dtype,
                        numbered(join.num_pages - 1, "page"), join.page_size, numbered(join.max_rows, "row"),
                    )  # fmt: skip
                    link = link_of(effect.worker, self.workers)
                    link.limit_frames(effect.worker, join.max_frame_bytes)
                    self.worker_processes.joined(effect.worker, join.pid)
                    # For the worker's own line, a command; empty if that needs more, or for a worker of another host.
                    is_here = self.ready.is_plain and not link.host_of(effect.worker)
                    frame = worker_wire.frame_of(effect, listen=self.listen() if is_here else "")
                    self.send(link, effect.worker, frame)
                case fx.WorkerProven():
                    self._proven(effect)
                case fx.WorkerRefused() | fx.AskRejoin():
                    self.order(effect.worker, effect)
                case _:
                    rest.append(effect)
        return rest

    def dispatch(self, effects: list[fx.Effect]) -> None:
        """Carries out effects, those for workers first, so that no device waits while text is sent to front ends.

        Each front end gets one frame, because a frame costs it and the core a wake-up.
        """
        later: dict[str, list[fx.Effect]] = {}
        for effect in effects:
            match effect:
                case fx.WorkerProven():
                    self._proven(effect)
                case fx.SendPlan() | fx.PrepareResource() | fx.DropResource() | fx.LoadWeights() | fx.DismissWorker():
                    self.order(effect.worker, effect)
                case fx.WorkerRefused() | fx.AskRejoin():
                    self.order(effect.worker, effect)
                case fx.KillWorker():
                    self.worker_processes.kill(effect.worker)
                case fx.Note():
                    log.warning("%s", effect.message)
                case fx.News():
                    log.info("%s", effect.message)
                case StepReport() | fx.Detached() | fx.Forgotten() | fx.WeightsChanged() | fx.StepOutput(frontend=""):
                    pass  # Only observers read these.
                case fx.WorkerAccepted():
                    raise AssertionError(f"{effect} does not answer a worker's message")
                case _:
                    later.setdefault(effect.frontend, []).append(effect)
        for frontend, of_frontend in later.items():
            self.send(self.frontends, frontend, self._frontend_frame(of_frontend))

    def order(self, worker: str, effect: fx.Effect) -> None:
        """Sends a worker what the effect says."""
        self.send(link_of(worker, self.workers), worker, worker_wire.frame_of(effect))

    def send(self, link: RouterLink, peer: str, frame: bytes) -> None:
        """Sends a frame, or adds the peer to `lost_peers` if it cannot be reached."""
        try:
            link.send(peer, frame)
        except PeerLostError as error:
            self.lost_peers.append((link, peer, str(error)))

    def _proven(self, effect: fx.WorkerProven) -> None:
        self.served_model.proven(effect.worker)
        if effect.was_standby:
            self.order(effect.worker, effect)

    def _frontend_frame(self, effects: Sequence[fx.Effect]) -> bytes:
        if len(effects) == 1 and not isinstance(effects[0], fx.ModelServed):
            return frontend_wire.frame_of(effects[0])
        frame = frontend_pb2.CoreToFrontend()
        for effect in effects:
            message = frame.batch.messages.add()
            if isinstance(effect, fx.ModelServed):
                if effect.info is not None and not self._was_ready:
                    # A command that tries the service, once, when the first model is served.
                    self._was_ready = True
                    announce("ready: %s", self.ready.at(self.listen()))
                message.model_state.CopyFrom(self.served_model.state(effect))
            else:
                frontend_wire.fill(message, effect)
        return frame.SerializeToString()
