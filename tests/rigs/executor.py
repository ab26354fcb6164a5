"""Carries out plans on pretend pages and answers them, noticing everything that the contract forbids.

A pure machine: `apply(plan) -> result`, no sockets, no clock, no randomness. The next token of a row is a
hash of its history as read back through the page list that the plans gave it, so a wrong page, a double
allocation or a lost write changes the output or is noticed here. What breaks the contract is answered FAILED
with the reason and kept in `violations`, which tests assert to be empty. Rows of a plan run in the plan's
order, chunks first.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from tandem.internal.v1 import worker_pb2 as pb

from tests.rigs.faults import Faults
from tests.rigs.hashing import draw
from tests.rigs.page_pool import PagePool
from tests.rigs.plan_arrays import Chunk, PlanArrays, PlanError, read_plan
from tests.rigs.row_tables import Row, RowTables


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
        checksum = self._tables.checksum()
        if plan.checksum != checksum:
            self._out_of_sync(result, f"checksum {plan.checksum:#x} came where {checksum:#x} is due")
            return
        if any(self._faults.fail_token in item.row.tokens[item.start : item.start + item.count] for item in work):
            result.status = pb.STEP_STATUS_FAILED
            result.detail = f"token {self._faults.fail_token} was in the step"
            return
        tokens: list[int] = []
        nonfinite: list[int] = []
        for item in work:
            self._compute(item, tokens, nonfinite)
        self._tables.seal_filled(arrays.started)
        result.tokens = np.array(tokens, dtype="<i4").tobytes()
        result.nonfinite = np.array(nonfinite, dtype="<i4").tobytes()

    def _check_budget(self, arrays: PlanArrays) -> None:
        align = self.shape.chunk_align
        cost = len(arrays.decode_rows) + sum(-(-chunk.count // align) * align for chunk in arrays.chunks)
        if cost > self.shape.token_budget:
            raise PlanError(f"the plan costs {cost} tokens of a budget of {self.shape.token_budget}")
        if cost == 0:
            raise PlanError("the plan runs nothing")

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

    def _compute(self, item: _Work, tokens: list[int], nonfinite: list[int]) -> None:
        row, start, end = item.row, item.start, item.start + item.count
        history = self._pool.read_history(row.idx, row.pages, row.tokens[:start])
        computed = row.tokens[start:end].tolist()
        history = self._pool.write(row.pages, start, computed, history)
        if row.nonfinite or self._faults.nonfinite_token in computed:
            row.nonfinite = True
            self._taint(row, end)
        if not item.samples:
            return
        token = draw(
            history,
            vocab=self.shape.sampled_vocab,
            temperature=row.temperature,
            seed=row.seed,
            sample_idx=row.sample_idx,
            banned=row.banned if end < row.banned_until else (),
        )
        if row.nonfinite:
            # The token means nothing then: an id that no code may look at.
            nonfinite.append(len(tokens))
            tokens.append(-1)
        else:
            self._proven[row.idx] = end
            tokens.append(token)
        row.tokens[end] = token
        row.num_tokens = end + 1

    def _taint(self, row: Row, end: int) -> None:
        """Anything up to `end` that no finite sample has read may be what was not finite."""
        size = self.shape.page_size
        suspected = set(row.pages[self._proven[row.idx] // size : -(-end // size)].tolist())
        self._pool.taint([page for page in self._tables.owned_pages(row) if page in suspected])
