"""Carries out plans on pretend pages and answers them, noticing everything that the contract forbids.

A pure machine: `apply(plan) -> result`, no sockets, no clock, no randomness. The next token of a row is a
hash of its history as read back through the page list that the plans gave it, so a wrong page, a double
allocation or a lost write changes the output or is noticed here. What breaks the contract is answered FAILED
with the reason and kept in `violations`, which tests assert to be empty. Rows of a plan run in the plan's
order, chunks first.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from tandem.internal.v1 import worker_pb2 as pb

from tests.rigs.faults import Faults
from tests.rigs.hashing import extend
from tests.rigs.page_pool import PagePool
from tests.rigs.plan_arrays import Chunk, PlanArrays, PlanError, read_plan
from tests.rigs.row_tables import Row, RowTables
from tests.rigs.sampling import Logprob, draw, logprob_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the pretend worker has. Token ids from sampled_vocab on are valid in prompts and never drawn."""

    page_size: int = 4
    num_pages: int = 64
    max_rows: int = 8
    max_length: int = 256
    token_budget: int = 64
    chunk_align: int = 1
    # Positions beyond one per row whose logits one step may tell; at least chunk_align.
    spare_logit_rows: int = 16
    vocab_size: int = 288
    sampled_vocab: int = 273
    eos_token_ids: tuple[int, ...] = (272,)

    @property
    def logit_rows(self) -> int:
        """What a Join says of it."""
        return self.max_rows + max(self.spare_logit_rows, self.chunk_align)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """One row's share of a step: compute `count` positions from `start`."""

    row: Row
    start: int
    count: int
    samples: bool

    def told_positions(self) -> range:
        """Prompt positions whose logprobs it tells."""
        first, end = self.row.started.prompt_logprobs_from, self.start + self.count
        last = min(end, self.row.started.num_prompt_tokens - 1)
        return range(max(first, self.start + 1), last + 1) if first else range(0)


@dataclass(slots=True)
class _Outcome:
    """What a step's rows gave, in the plan's order."""

    tokens: list[int] = field(default_factory=list)
    nonfinite: list[int] = field(default_factory=list)
    # (Logprob, alternatives wanted); None where the values are not finite.
    logprobs: list[tuple[Logprob | None, int]] = field(default_factory=list)
    prompt_logprobs: list[tuple[Logprob | None, int]] = field(default_factory=list)


class Executor:
    """One pretend worker's pool and rows. `begin` answers Joined; `apply` answers a plan."""

    def __init__(
        self,
        shape: Shape,
        *,
        faults: Faults | None = None,
        on_violation: Callable[[str], None] | None = None,
    ) -> None:
        self.shape = shape
        self.violations: list[str] = []
        self.num_applied = 0
        self._faults = faults or Faults()
        self._on_violation = on_violation
        self._pool = PagePool(num_pages=shape.num_pages, page_size=shape.page_size)
        self._tables = RowTables(
            max_rows=shape.max_rows,
            num_pages=shape.num_pages,
            page_size=shape.page_size,
            max_length=shape.max_length,
            vocab_size=shape.vocab_size,
        )
        self._generation = 0
        self._step = 0
        self._broken = False
        # Row → the positions that its last finite sample read: finite for certain, whatever comes after.
        self._proven: dict[int, int] = {}

    @property
    def tables(self) -> dict[int, tuple[int, list[int]]]:
        """Row → (next position, page list), as table_checksum takes it."""
        return {row.idx: (row.position, row.pages[: row.num_pages].tolist()) for row in self._tables.rows.values()}

    def begin(self, generation: int) -> None:
        """The core said Joined: the pool is zeroed, plans of this generation follow, whatever came before."""
        self._pool.zero(list(range(1, self.shape.num_pages)))
        self._open(generation)

    def _open(self, generation: int) -> None:
        self._generation = generation
        self._step = 0
        self._broken = False
        self._tables.reset()

    def apply(self, plan: pb.StepPlan) -> pb.StepResult:
        """The result of one plan; plans are applied in the order in which they came."""
        result = pb.StepResult(generation=plan.generation, step=plan.step, status=pb.STEP_STATUS_OK)
        if plan.generation > self._generation:
            self._open(plan.generation)
        if self._broken or plan.generation < self._generation:
            result.status = pb.STEP_STATUS_SKIPPED
            return result
        self.num_applied += 1
        self._step += 1
        if self._commit_fault(result):
            self._broken = True
            return result
        try:
            if plan.step != self._step:
                self._out_of_sync(result, f"step {plan.step} came where step {self._step} was due")
            else:
                self._run(plan, read_plan(plan), result)
        except PlanError as error:
            result.status = pb.STEP_STATUS_FAILED
            result.detail = str(error)
            self._note(result, str(error))
        self._broken = result.status != pb.STEP_STATUS_OK
        return result

    def _commit_fault(self, result: pb.StepResult) -> bool:
        for steps, status in (
            (self._faults.fail_steps, pb.STEP_STATUS_FAILED),
            (self._faults.oom_steps, pb.STEP_STATUS_OUT_OF_MEMORY),
            (self._faults.out_of_sync_steps, pb.STEP_STATUS_OUT_OF_SYNC),
        ):
            if self.num_applied in steps:
                result.status = status
                result.detail = f"ordered for step {self.num_applied}"
                return True
        return False

    def _note(self, result: pb.StepResult, text: str) -> None:
        line = f"generation {result.generation} step {result.step}: {text}"
        self.violations.append(line)
        if self._on_violation is not None:
            self._on_violation(line)

    def _out_of_sync(self, result: pb.StepResult, text: str) -> None:
        result.status = pb.STEP_STATUS_OUT_OF_SYNC
        result.detail = text
        self._note(result, text)

    def _run(self, plan: pb.StepPlan, arrays: PlanArrays, result: pb.StepResult) -> None:
        if len({started.row for started in arrays.started}) != len(arrays.started):
            raise PlanError("a row is started twice in one plan")
        self._pool.zero(arrays.zero_pages)
        for started in arrays.started:
            self._pool.check_finite(started.row, started.pages)
            self._tables.start(started)
            self._proven[started.row] = started.first_position
        for row_idx, page in arrays.appends:
            self._pool.check_finite(row_idx, [page])
            self._tables.append(row_idx, page)
        self._check_budget(arrays)
        work = self._order_work(arrays)
        self._check_logits(work)
        checksum = self._tables.checksum()
        if plan.checksum != checksum:
            self._out_of_sync(result, f"checksum {plan.checksum:#x} came where {checksum:#x} is due")
            return
        if any(self._faults.fail_token in item.row.tokens[item.start : item.start + item.count] for item in work):
            result.status = pb.STEP_STATUS_FAILED
            result.detail = f"token {self._faults.fail_token} was in the step"
            return
        outcome = _Outcome()
        for item in work:
            self._compute(item, outcome)
        self._tables.seal_filled(arrays.started)
        result.tokens = np.array(outcome.tokens, dtype="<i4").tobytes()
        result.nonfinite = np.array(outcome.nonfinite, dtype="<i4").tobytes()
        if outcome.logprobs:
            _tell(result.logprobs, outcome.logprobs)
        if outcome.prompt_logprobs:
            _tell(result.prompt_logprobs, outcome.prompt_logprobs)

    def _check_budget(self, arrays: PlanArrays) -> None:
        align = self.shape.chunk_align
        cost = len(arrays.decode_rows) + sum(-(-chunk.count // align) * align for chunk in arrays.chunks)
        if cost > self.shape.token_budget:
            raise PlanError(f"the plan costs {cost} tokens of a budget of {self.shape.token_budget}")
        if cost == 0:
            raise PlanError("the plan runs nothing")

    def _check_logits(self, work: list[_Work]) -> None:
        wanted = sum(item.samples + len(item.told_positions()) for item in work)
        if wanted > self.shape.logit_rows:
            raise PlanError(f"the plan wants the logits of {wanted} positions; the limit is {self.shape.logit_rows}")

    def _order_work(self, arrays: PlanArrays) -> list[_Work]:
        """Checks each row's share against its tables and moves its next position on."""
        running = [chunk.row for chunk in arrays.chunks] + arrays.decode_rows
        if len(set(running)) != len(running):
            raise PlanError("a row runs twice in one plan")
        work = [self._order_chunk(chunk) for chunk in arrays.chunks]
        work += [self._order_decode(idx) for idx in arrays.decode_rows]
        for item in work:
            self._tables.check_write(item.row, item.start, item.count)
            item.row.position = item.start + item.count
        return work

    def _order_chunk(self, chunk: Chunk) -> _Work:
        row = self._tables.row(chunk.row)
        end = chunk.start + chunk.count
        if chunk.start != row.position:
            raise PlanError(
                f"row {row.idx}: a chunk starts at {chunk.start}, the row's next position is {row.position}"
            )
        if chunk.count < 1 or end > row.num_tokens:
            raise PlanError(f"row {row.idx}: a chunk of {chunk.count} ends at {end}, {row.num_tokens} tokens are known")
        if chunk.samples != (end == row.num_tokens):
            raise PlanError(f"row {row.idx}: a chunk to {end} of {row.num_tokens} tokens says samples={chunk.samples}")
        return _Work(row=row, start=chunk.start, count=chunk.count, samples=chunk.samples)

    def _order_decode(self, row_idx: int) -> _Work:
        row = self._tables.row(row_idx)
        if row.position != row.num_tokens - 1:
            raise PlanError(
                f"row {row.idx} decodes position {row.position}, it holds {row.num_tokens} tokens and its"
                f" last is at {row.num_tokens - 1}"
            )
        return _Work(row=row, start=row.position, count=1, samples=True)

    def _compute(self, item: _Work, outcome: _Outcome) -> None:
        row, start, end = item.row, item.start, item.start + item.count
        history = self._pool.read_history(row.idx, row.pages, row.tokens[:start])
        computed = row.tokens[start:end].tolist()
        self._tell_prompt(item, computed, history, outcome)
        history = self._pool.write(row.pages, start, computed, history)
        if row.nonfinite or self._faults.nonfinite_token in computed:
            row.nonfinite = True
            self._taint(row, end)
        if not item.samples:
            return
        started = row.started
        banned = row.never | started.banned if end < started.banned_until else row.never
        allowed = started.settings.allowed
        token = draw(history, row.key, vocab=self.shape.sampled_vocab, allowed=allowed, banned=banned)
        if row.nonfinite:
            # The token means nothing then: an id that no code may look at.
            outcome.nonfinite.append(len(outcome.tokens))
            outcome.tokens.append(-1)
        else:
            self._proven[row.idx] = end
            outcome.tokens.append(token)
        if started.num_logprobs:
            told = None if row.nonfinite else self._logprob(history, token, started.num_logprobs - 1)
            outcome.logprobs.append((told, started.num_logprobs - 1))
        row.tokens[end] = token
        row.num_tokens = end + 1

    def _tell_prompt(self, item: _Work, computed: list[int], history: int, outcome: _Outcome) -> None:
        """Logprobs of the prompt's tokens behind the computed ones; `history` is what came before these."""
        row, told = item.row, item.told_positions()
        top_k = max(0, row.started.num_logprobs - 1)
        nonfinite = row.nonfinite
        for position, token in enumerate(computed[: max(0, told.stop - item.start - 1)], start=item.start + 1):
            history = extend(history, token)
            nonfinite |= token == self._faults.nonfinite_token
            if position in told:
                following = int(row.tokens[position])
                logprob = None if nonfinite else self._logprob(history, following, top_k)
                outcome.prompt_logprobs.append((logprob, top_k))

    def _logprob(self, history: int, token: int, top_k: int) -> Logprob:
        return logprob_of(history, token, vocab_size=self.shape.vocab_size, top_k=top_k)

    def _taint(self, row: Row, end: int) -> None:
        """Anything up to `end` that no finite sample has read may be what was not finite."""
        size = self.shape.page_size
        suspected = set(row.pages[self._proven[row.idx] // size : -(-end // size)].tolist())
        self._pool.taint([page for page in self._tables.owned_pages(row) if page in suspected])


def _tell(out: pb.Logprobs, entries: list[tuple[Logprob | None, int]]) -> None:
    """As many alternatives for each as the greediest wants. Those beyond an entry's own are wrong: nobody may tell."""
    out.top_k = max(top_k for _, top_k in entries)
    logprobs = np.full(len(entries), np.nan, "<f4")
    ids = np.zeros((len(entries), out.top_k), "<i4")
    top = np.ones((len(entries), out.top_k), "<f4")
    for i, (told, _) in enumerate(entries):
        if told is None:
            # Ids that no code may look at.
            ids[i] = -1
            continue
        logprobs[i] = told.logprob
        ids[i, : len(told.top)] = [token for token, _ in told.top]
        top[i, : len(told.top)] = [logprob for _, logprob in told.top]
    out.logprobs, out.top_token_ids, out.top_logprobs = logprobs.tobytes(), ids.tobytes(), top.tobytes()
