"""Keeps a mask server running: exchanges frames with it, keeps to the limits of time, and replaces it.

A server that computes too long is killed, and one that has ended is started again; the next one takes all output
tokens anew. What was computed for too long fails, and what two servers ended in. Knows nothing of the order of events
in a step.
"""

import logging
from collections.abc import Callable, Iterable

from gpu_worker.constraints.frames import MAX_NUMBER, MAX_ROWS, Frame, FrameError, Kind, RowState, Stage, Work, advance
from gpu_worker.constraints.process import ServerGone, ServerProcess, ServerUnusable
from gpu_worker.constraints.rows import ConstrainedRow, Fate, Prepared, Registry
from gpu_worker.constraints.watch import SLICE_SECONDS, Excess, Limits, Watch

log = logging.getLogger(__name__)

# Servers that may end one after another without a mask.
_MOST_DEATHS = 5
_NOT_STARTED = "no mask server can be started"


class Supervisor:
    """One mask server after another. No method raises because of a server."""

    def __init__(self, server: ServerProcess, known: Registry, limits: Limits) -> None:
        self._server, self._known = server, known
        self._watch = Watch(server.area, limits)
        # The rows of requests without their last answer, each with its output tokens at that time.
        self._requests: dict[int, list[tuple[ConstrainedRow, int]]] = {}
        self._num_requests = self._num_deaths = 0
        self._is_running = False
        # Why no server can serve this model; empty if one can.
        self._refusal = ""

    def prepare(self, known: Prepared) -> None:
        """Sends a constraint that is registered to the server, which starts if there is none."""
        if self._refusal:
            self._known.remove(known, self._refusal)
        elif self._is_running:
            self._exchange(lambda: self._server.send(Frame(Kind.PREPARE, known.id, known.source)))
        else:
            self._replace()

    def drop(self, known: Prepared) -> None:
        """Lets the server forget a constraint."""
        if self._is_running:
            self._exchange(lambda: self._server.send(Frame(Kind.DROP, known.id)))

    def ask(self, rows: Iterable[ConstrainedRow]) -> None:
        """Asks for the masks that the present server was not asked for."""
        wanted = [own for own in rows if own.fate is Fate.OPEN and own.asked != own.num_tokens]
        for first in range(0, len(wanted), MAX_ROWS):
            part = wanted[first : first + MAX_ROWS]
            self._exchange(lambda part=part: self._ask(part))

    def _ask(self, wanted: list[ConstrainedRow]) -> None:
        for own in wanted:
            if not own.constraint.is_defined:
                own.constraint.is_defined = True
                self._server.send(Frame(Kind.DEFINE, own.constraint.id, own.constraint.source))
        self._num_requests = self._num_requests % MAX_NUMBER + 1
        self._requests[self._num_requests] = [(own, own.num_tokens) for own in wanted]
        for own in wanted:
            own.asked = own.num_tokens
        entries = [(own.row, own.start, own.constraint.id, own.num_tokens) for own in wanted]
        self._server.send(advance(self._num_requests, entries))

    def wait(self) -> None:
        """Waits a moment for frames; then as `look`, for a worker that waits for rows."""
        if self._is_running:
            self._server.wait(SLICE_SECONDS)
        self.look(waits_for_rows=True)

    def look(self, *, waits_for_rows: bool) -> None:
        """Takes the frames that have come, and replaces a server that takes too long."""
        if self._is_running:
            self._exchange(lambda: self._look(waits_for_rows))

    def _look(self, waits_for_rows: bool) -> None:
        for frame in self._server.receive():
            self._handle(frame)
        if self._watch.start_overran():
            raise ServerGone("it did not start in time")
        if late := self._watch.overdue_preparation():
            number, excess = late
            known = self._known.by_id.get(number)
            if known is not None and self._is_blamed(known, excess):
                self._known.remove(known, f"preparing the constraint {excess.words}")
            log.warning("the mask server is replaced: preparing a constraint %s", excess.words)
            self._replace()
        elif waits_for_rows and (overdue := self._watch.overdue_work()) is not None:
            self._end_of_patience(*overdue)

    def _handle(self, frame: Frame) -> None:
        if frame.kind is Kind.SERVING:
            self._watch.begin(frame.number, *frame.of_serving())
        elif frame.kind is Kind.PREPARED:
            self._answer(frame.number, frame.text)
        else:
            found, detail = frame.states()
            request = self._requests[frame.number]
            if frame.kind is Kind.MASKED:
                del self._requests[frame.number]
                self._num_deaths = 0
            for (own, num_tokens), state in zip(request, found, strict=True):
                if own.num_tokens == num_tokens:
                    _follow(own, frame.kind, state, detail)

    def _answer(self, constraint: int, error: str) -> None:
        known = self._known.by_id.get(constraint)
        if known is None or known.is_answered:
            return
        self._num_deaths = 0
        if error:
            self._known.remove(known, error)
        else:
            known.is_answered = known.is_defined = True
            self._known.answers.append((known.hash, ""))

    def _end_of_patience(self, work: Work, excess: Excess) -> None:
        """Fails what the server has computed for too long, and replaces the server."""
        own, defined = self._row_of(work), self._constraint_of(work)
        if own is not None and self._is_blamed(own, excess):
            own.fail(f"the constraint {excess.words}, at output token {work.token}")
        elif defined is not None and self._is_blamed(defined, excess):
            self._known.remove(defined, f"preparing the constraint again {excess.words}")
        log.warning("the mask server is replaced: %s", own.detail if own and own.detail else "it does not answer")
        self._replace()

    @staticmethod
    def _is_blamed(one: ConstrainedRow | Prepared, excess: Excess) -> bool:
        """Whether the limit is one of CPU time, or another server was as late with the same."""
        one.num_deaths += 1
        return excess.is_of_cpu or one.num_deaths > 1

    def _row_of(self, work: Work) -> ConstrainedRow | None:
        """The start of a row that the server computes for; None if its request is answered, or nothing waits for it."""
        if work.stage not in (Stage.TAKE, Stage.MASK):
            return None
        found = self._requests.get(work.number, [])[work.entry : work.entry + 1]
        return next((own for own, _ in found if own.fate is Fate.OPEN), None)

    def _constraint_of(self, work: Work) -> Prepared | None:
        """The constraint that the server compiles for rows."""
        return self._known.by_id.get(work.number) if work.stage is Stage.DEFINE else None

    def _exchange(self, action: Callable[[], None]) -> None:
        try:
            action()
        except ServerUnusable as reason:
            self._refusal = f"the model's tokenizer does not serve constraints: {reason}"
            self._give_up(self._refusal)
        except OSError as error:
            self._give_up(f"{_NOT_STARTED}: {error}")
        except (ServerGone, FrameError, LookupError, ValueError) as reason:
            self._died(str(reason))

    def _died(self, reason: str) -> None:
        """Starts another server. Fails what two servers have ended in."""
        self._num_deaths += 1
        work = self._watch.work
        own = self._row_of(work)
        if own is not None:
            own.num_deaths += 1
            if own.num_deaths > 1:
                own.fail(f"the constraint ended its process twice, at output token {work.token}")
        for known in (self._known.by_id.get(self._watch.prepared), self._constraint_of(work)):
            if known is not None:
                known.num_deaths += 1
                if known.num_deaths > 1:
                    self._known.remove(known, "the constraint ended its process twice")
        log.warning("the mask server is replaced: %s", reason)
        if self._num_deaths > _MOST_DEATHS:
            self._num_deaths = 0
            self._give_up(f"the mask server ended {_MOST_DEATHS + 1} times in a row: {reason}")
        else:
            self._replace()

    def _replace(self) -> None:
        """Starts a server in place of the present one, if there is one."""
        self._requests.clear()
        self._known.forget_server()
        self._watch.restart()
        try:
            self._server.replace()
        except OSError as error:
            self._give_up(f"{_NOT_STARTED}: {error}")
            return
        self._is_running = True
        for known in self._known.unanswered():
            self._exchange(lambda known=known: self._server.send(Frame(Kind.PREPARE, known.id, known.source)))

    def _give_up(self, reason: str) -> None:
        """Constraints end with this reason. The next one is tried with another server."""
        log.error("constraints end: %s", reason)
        self._is_running = False
        self._requests.clear()
        self._known.remove_all(reason)
        self._known.forget_server()

    def close(self) -> None:
        """Ends the server."""
        self._is_running = False
        self._server.close()


def _follow(own: ConstrainedRow, kind: Kind, state: int, detail: str) -> None:
    if state == RowState.FAILED:
        own.fail(detail)
    elif kind is Kind.MASKED:
        own.masked, own.num_deaths, own.constraint.num_deaths = own.num_tokens, 0, 0
    else:
        own.taken = own.num_tokens
        # An empty output ends with EOS.
        if state == RowState.COMPLETE and own.num_tokens:
            own.fate = Fate.COMPLETE
