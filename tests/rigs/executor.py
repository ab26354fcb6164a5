"""Carries out plans on pretend pages and answers them, noticing everything that the contract forbids.

A pure machine: `apply(plan) -> result`, no sockets, no clock, no randomness. The next token of a row is a
hash of its history as read back through the page list that the plans gave it, so a wrong page, a double
allocation or a lost write changes the output or is noticed here. What breaks the contract is answered FAILED
with the reason and kept in `violations`, which tests assert to be empty. Rows of a plan run in the plan's
order, chunks first, but a row that writes a page comes before those that share it.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from hashlib import sha256

import numpy as np
from tandem.internal.v1 import worker_pb2 as pb

from tests.rigs.faults import Faults
from tests.rigs.hashing import salt_of
from tests.rigs.page_labels import Labels
from tests.rigs.page_pool import PagePool, Slots
from tests.rigs.plan_arrays import Chunk, PlanArrays, PlanError, StartedRow, read_plan
from tests.rigs.row_tables import Row, RowTables
from tests.rigs.sampling import Logprob, draw, logprob_of
from tests.rigs.shape import Shape
from tests.rigs.toy_constraints import REFUSAL, Matcher, ToyConstraint, late


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """One row's share of a step: compute `count` positions from `start`."""

    row: Row
    start: int
    count: int
    samples: bool

    def told_positions(self) -> range:
        """Prompt positions with logprobs in the result."""
        first, end = self.row.started.prompt_logprobs_from, self.start + self.count
        last = min(end, self.row.started.num_prompt_tokens - 1)
        return range(max(first, self.start + 1), last + 1) if first else range(0)


@dataclass(slots=True)
class _Outcome:
    """What one row's share gave. Logprobs are (Logprob, alternatives wanted); None where values are not finite."""

    token: int | None = None
    nonfinite: bool = False
    # Why there was no mask.
    failure: str = ""
    is_complete: bool = False
    logprob: tuple[Logprob | None, int] | None = None
    prompt_logprobs: list[tuple[Logprob | None, int]] = field(default_factory=list)


class Poisoned(Exception):
    """The plan has computed a token that kills the worker, or hangs it if `hangs`. It has no result."""

    def __init__(self, *, hangs: bool) -> None:
        super().__init__()
        self.hangs = hangs


class Executor:
    """One pretend worker's pool and rows. `begin` answers Joined; `apply` answers a plan."""

    def __init__(
        self,
        shape: Shape,
        *,
        faults: Faults | None = None,
        on_violation: Callable[[str], None] | None = None,
        pool_id: bytes = b"",
        shared: dict[bytes, Slots] | None = None,
        tokens_by_version: bool = True,
    ) -> None:
        """`shared`: the memory of dead workers' pools, by id. `tokens_by_version`: whether tokens, not only
        pages, depend on the version of the weights."""
        self._tokens_by_version = tokens_by_version
        self.shape = shape
        self.pool_id = pool_id
        self._shared = {} if shared is None else shared
        self.violations: list[str] = []
        self.num_applied = 0
        self._faults = faults or Faults()
        self._on_violation = on_violation
        self._pool = PagePool(
            num_pages=shape.num_pages,
            page_size=shape.page_size,
            host_pages=shape.host_pages,
            max_length=shape.max_length,
        )
        # What the core has sent and not dropped: constraints by hash, and other resources by kind and hash; and what of
        # it is answered as ready, by kind, which is empty for a constraint, and hash.
        self._constraints: dict[bytes, ToyConstraint] = {}
        self._others: dict[tuple[str, bytes], ToyConstraint] = {}
        self._ready: set[tuple[str, bytes]] = set()
        self._tables = RowTables(shape, self._pool, self._constraints)
        self.labels = Labels(shape.page_size)
        self._generation = 0
        self._step = 0
        self._broken = False
        self.version = self.weights_folder = ""
        self._salt = 0

    def load_weights(self, order: pb.LoadWeights, *, refusal: str = "") -> pb.WeightsLoaded:
        """Pages of other weights belong to the row no more: reading one breaks the contract."""
        if not refusal:
            self.version, self.weights_folder, self._salt = order.version, order.folder, salt_of(order.version)
            self.labels.by_page.clear()
            if not order.keep_rows:
                # The self-check uses rows and pages.
                self._tables.reset()
        return pb.WeightsLoaded(version=order.version, ok=not refusal, detail=refusal)

    def prepare(self, order: pb.PrepareConstraint) -> float:
        """Takes a resource, which may be a known one. `constraint_ready` answers after the seconds returned."""
        if sha256(order.source).digest() != order.hash:
            self._notice(f"a resource of {len(order.source)} bytes came with another hash")
        resource = ToyConstraint.of(order.source)
        if order.kind:
            self._others[order.kind, order.hash] = resource
        else:
            self._constraints[order.hash] = resource
        return resource.prepare_seconds

    def constraint_ready(self, order: pb.PrepareConstraint) -> pb.ConstraintReady:
        """The answer for a resource that was sent. From now on rows with it may sample, or start."""
        name = order.kind, order.hash
        if (self._others[name] if order.kind else self._constraints[order.hash]).is_refused:
            # Plans in flight may start rows with a constraint, which never sample.
            return pb.ConstraintReady(hash=order.hash, kind=order.kind, error=REFUSAL)
        self._ready.add(name)
        return pb.ConstraintReady(hash=order.hash, kind=order.kind)

    def drop(self, order: pb.DropConstraint) -> None:
        name = order.kind, order.hash
        if name not in self._ready:
            self._notice("a resource is dropped that was not answered as ready")
        self._ready.discard(name)
        if order.kind:
            self._others.pop(name, None)
        else:
            self._constraints.pop(order.hash, None)

    @property
    def tables(self) -> dict[int, tuple[int, list[int]]]:
        """Row → (next position, page list), as table_checksum takes it."""
        return {row.idx: (row.position, row.pages[: row.num_pages].tolist()) for row in self._tables.rows.values()}

    @property
    def memory(self) -> Slots:
        return self._pool.device

    def begin(self, generation: int) -> None:
        """A core said Joined, and that no page is kept."""
        self.joined(pb.Joined(generation=generation))

    def joined(self, message: pb.Joined) -> None:
        """A core said Joined: plans of its generation follow, after any others. The pool is zeroed or kept."""
        self.labels.joined(message)
        if message.keeps_pages:
            self._pool.keep(self.labels.by_page)
        else:
            self._pool.reset()
        self._constraints.clear()
        self._others.clear()
        self._ready.clear()
        self._open(message.generation)

    def report_pages(self, join: pb.Join) -> None:
        """Writes the pages that it has kept into its Join."""
        self.labels.report(join, self._generation)

    def _open(self, generation: int) -> None:
        self._generation = self._pool.device.generation = generation
        self._step = 0
        self._broken = False
        self._tables.reset()

    def apply(self, plan: pb.StepPlan) -> pb.StepResult:
        """The result of one plan; plans are applied in the order in which they came. Raises Poisoned."""
        result = pb.StepResult(generation=plan.generation, step=plan.step, status=pb.STEP_STATUS_OK)
        if plan.generation > self._generation:
            self._open(plan.generation)
        if self._broken or plan.generation < self._generation:
            result.status = pb.STEP_STATUS_SKIPPED
            return result
        self.num_applied += 1
        self._step += 1
        try:
            if not self._take_over(plan, result):
                pass
            elif self._commit_fault(result):
                if result.status != pb.STEP_STATUS_OUT_OF_SYNC:
                    self._pool.spoil(self._read_plan(plan))
            elif plan.step != self._step:
                self._out_of_sync(result, f"step {plan.step} came where step {self._step} was due")
            else:
                self._run(plan, self._read_plan(plan), result)
        except PlanError as error:
            result.status = pb.STEP_STATUS_FAILED
            result.detail = str(error)
            self._note(result, str(error))
        self._broken = result.status != pb.STEP_STATUS_OK
        return result

    def _take_over(self, plan: pb.StepPlan, result: pb.StepResult) -> bool:
        """Maps the pool that the plan names. Returns False, with the reason in `result`, if it is gone."""
        if not plan.HasField("take_over"):
            return True
        memory = self._shared.pop(plan.take_over.pool_id, None)
        if memory is None or memory.generation > plan.take_over.generation:
            memory, result.status = None, pb.STEP_STATUS_OUT_OF_SYNC
            result.detail = "the pool is gone, in use, or another session has written to it"
            # The core gives all pages up, and expects no value in them that is not finite.
            self.labels.by_page.clear()
            self._pool.reset()
        else:
            memory.generation = plan.generation
            self.pool_id = plan.take_over.pool_id
            self._pool.use(memory)
        result.pool_id = self.pool_id
        return memory is not None

    def fail_at(self, steps: Collection[int]) -> None:
        """Lets these steps fail, and no others, as `Faults.fail_steps` does."""
        self._faults = replace(self._faults, fail_steps=frozenset(steps))

    def _read_plan(self, plan: pb.StepPlan) -> PlanArrays:
        arrays = read_plan(plan)
        self.labels.follow(plan, arrays, self._pool.device)
        return arrays

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
        self._notice(f"generation {result.generation} step {result.step}: {text}")

    def _notice(self, line: str) -> None:
        self.violations.append(line)
        if self._on_violation is not None:
            self._on_violation(line)

    def _out_of_sync(self, result: pb.StepResult, text: str) -> None:
        result.status = pb.STEP_STATUS_OUT_OF_SYNC
        result.detail = text
        self._note(result, text)

    def _run(self, plan: pb.StepPlan, arrays: PlanArrays, result: pb.StepResult) -> None:
        filled = self._pool.move(arrays)
        self._tables.apply(arrays.started, arrays.appends, filled)
        for one in arrays.started:
            self._check_needs(one)
        self._check_budget(arrays)
        work = self._order_work(arrays)
        self._check_logits(work)
        checksum = self._tables.checksum()
        if plan.checksum != checksum:
            self._out_of_sync(result, f"checksum {plan.checksum:#x} came where {checksum:#x} is due")
            return
        for token in (self._faults.kill_token, self._faults.hang_token):
            if token is not None and _computes(work, token):
                raise Poisoned(hangs=token == self._faults.hang_token)
        if self._faults.fail_token is not None and _computes(work, self._faults.fail_token):
            result.status = pb.STEP_STATUS_FAILED
            result.detail = f"token {self._faults.fail_token} was in the step"
            self._pool.spoil(arrays)
            return
        if what := self._without_memory(work):
            result.status, result.detail = pb.STEP_STATUS_OUT_OF_MEMORY, what
            self._pool.spoil(arrays)
            return
        outcomes = {idx: self._compute(work[idx]) for idx in self._writers_first(work, arrays.started)}
        self._check_idle(work, arrays.started)
        _fill(result, [outcomes[idx] for idx in range(len(work))])

    def _without_memory(self, work: list[_Work]) -> str:
        """Why the step does not fit the worker's memory; empty if it does."""
        for what, count, limit in (
            ("positions", sum(item.count for item in work), self._faults.memory_tokens),
            ("rows", len(work), self._faults.memory_rows),
        ):
            if limit is not None and count > limit:
                return f"there is memory for {limit} {what}, not for {count}"
        computed = (item.row.tokens[item.start : item.start + item.count] for item in work)
        return f"token {self._faults.oom_token}" if any(self._faults.oom_token in tokens for tokens in computed) else ""

    def _writers_first(self, work: list[_Work], started: list[StartedRow]) -> list[int]:
        """The order in which rows compute: a row that writes a page in this step comes before those that share it."""
        size = self.shape.page_size
        shared = {one.row: self._shared_pages(one) for one in started if one.first_position >= size}
        if not shared:
            return list(range(len(work)))
        writers: dict[int, int] = {}
        for idx, item in enumerate(work):
            pages = item.row.pages[item.start // size : (item.start + item.count - 1) // size + 1]
            writers |= dict.fromkeys(pages.tolist(), idx)
        order: list[int] = []
        entered: set[int] = set()

        def visit(idx: int) -> None:
            if idx in entered:
                if idx not in order:
                    raise PlanError(f"row {work[idx].row.idx} shares pages that wait for its own")
                return
            entered.add(idx)
            for page in shared.get(work[idx].row.idx, ()):
                if page in writers:
                    visit(writers[page])
            order.append(idx)

        for idx in range(len(work)):
            visit(idx)
        return order

    def _shared_pages(self, started: StartedRow) -> list[int]:
        """Full pages that came filled and that its first query reads."""
        first, size = started.first_position, self.shape.page_size
        full = started.pages[: first // size]
        return [page for idx, page in enumerate(full) if not self.shape.is_behind(idx, first)]

    def _check_idle(self, work: list[_Work], started: list[StartedRow]) -> None:
        """What came filled to rows that do not run in this step must stand there too."""
        running = {item.row.idx for item in work}
        for one in started:
            if one.row not in running:
                self._read(self._tables.row(one.row), one.first_position)

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
            self._tables.check_access(item.row, item.start, item.count)
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

    def _read(self, row: Row, position: int) -> list[int]:
        """What the row's query at this position sees of its past, which must stand there; the positions not finite."""
        row.hash_up_to(position, self._salt)
        first, bad = self.shape.first_read(position), list[int]()
        for span in (slice(0, min(self.shape.sink_tokens, first)), slice(first, position)):
            if span.start < span.stop:
                bad += self._pool.read(row.idx, row.pages, span, row.tokens, row.hashes[1:])
        return bad

    def _check_needs(self, started: StartedRow) -> None:
        if missing := [kind for kind, name in started.other_needs if (kind, name) not in self._ready]:
            raise PlanError(f"row {started.row} needs the {missing[0]} that is not ready, or was dropped")

    def _compute(self, item: _Work) -> _Outcome:
        row, start, end = item.row, item.start, item.start + item.count
        self._check_needs(row.started)
        outcome, bad = _Outcome(), self._read(row, start)
        computed = row.tokens[start:end].tolist()
        row.hash_up_to(end, self._salt)
        written = self._not_finite(start, computed, bad)
        bad += written
        self._tell_prompt(item, bad, outcome)
        self._pool.write(row.idx, row.pages, start, computed, row.hashes[start + 1 : end + 1], written)
        if not item.samples:
            return outcome
        hashes = row.hashes if self._tokens_by_version or row.plain is None else row.plain
        started, history = row.started, int(hashes[end])
        banned = row.never | started.banned if end < started.banned_until else row.never
        allowed, matcher = started.settings.allowed, row.matcher
        if started.constraint and ("", started.constraint) not in self._ready:
            raise PlanError(f"row {row.idx} samples, and its constraint is not ready")
        if matcher is not None:
            allowed = matcher.allowed(self.shape.sampled_vocab, self.shape.eos_token_ids)
        token = draw(history, row.key, vocab=self.shape.sampled_vocab, allowed=allowed, banned=banned)
        outcome.nonfinite = self._sees(end - 1, bad)
        # Where it is not finite the token means nothing: an id that no code may look at.
        outcome.token = -1 if outcome.nonfinite else token
        if started.num_logprobs:
            told = None if outcome.nonfinite else self._logprob(history, token, started.num_logprobs - 1)
            outcome.logprob = told, started.num_logprobs - 1
        if matcher is not None and not outcome.nonfinite:
            self._follow(matcher, token, outcome)
        row.tokens[end] = token
        row.num_tokens = end + 1
        return outcome

    def _follow(self, matcher: Matcher, token: int, outcome: _Outcome) -> None:
        """Appends a token to the output of a row with a constraint."""
        if matcher.fails:
            outcome.failure, outcome.token = late(matcher.num_tokens + 1), -1
        was_complete = matcher.is_complete
        matcher.take(token)
        # A plan that was in flight may sample after the end.
        outcome.is_complete = matcher.is_complete and not was_complete and not outcome.failure

    def _not_finite(self, start: int, computed: list[int], bad: list[int]) -> list[int]:
        """The positions written with values that are not finite.

        Without a window all are, from the first one on. With one, only the poison itself is, as if the last layer had
        failed: no later position uses that layer's values, so one that sees the poison no more is finite again.
        """
        poison = self._faults.nonfinite_token
        if self.shape.window:
            return [start + idx for idx, token in enumerate(computed) if token == poison]
        first = 0 if bad else computed.index(poison) if poison in computed else len(computed)
        return list(range(start + first, start + len(computed)))

    def _sees(self, position: int, bad: list[int]) -> bool:
        """Whether the query at this position sees one of these."""
        first, sinks = self.shape.first_read(position), self.shape.sink_tokens
        return any(one <= position and (one >= first or one < sinks) for one in bad)

    def _tell_prompt(self, item: _Work, bad: list[int], outcome: _Outcome) -> None:
        """Logprobs of the prompt's tokens behind the computed ones; positions in `bad` are not finite."""
        row = item.row
        top_k = max(0, row.started.num_logprobs - 1)
        for position in item.told_positions():
            hashes = row.hashes if self._tokens_by_version or row.plain is None else row.plain
            history, token = int(hashes[position]), int(row.tokens[position])
            logprob = None if self._sees(position - 1, bad) else self._logprob(history, token, top_k)
            outcome.prompt_logprobs.append((logprob, top_k))

    def _logprob(self, history: int, token: int, top_k: int) -> Logprob:
        return logprob_of(history, token, vocab_size=self.shape.vocab_size, top_k=top_k)


def _computes(work: list[_Work], token: int) -> bool:
    """Whether one of the computed positions has this token."""
    return any(token in item.row.tokens[item.start : item.start + item.count] for item in work)


def _fill(result: pb.StepResult, outcomes: list[_Outcome]) -> None:
    """What the rows gave, in the plan's order."""
    sampled = [outcome for outcome in outcomes if outcome.token is not None]
    result.tokens = np.array([outcome.token for outcome in sampled], dtype="<i4").tobytes()
    result.nonfinite = np.array([i for i, one in enumerate(sampled) if one.nonfinite], dtype="<i4").tobytes()
    complete = [i for i, one in enumerate(sampled) if one.is_complete]
    failed = [i for i, one in enumerate(sampled) if one.failure]
    result.constraint_complete = np.array(complete, dtype="<i4").tobytes()
    result.constraint_failed = np.array(failed, dtype="<i4").tobytes()
    result.constraint_detail = sampled[failed[0]].failure if failed else ""
    told = [outcome.logprob for outcome in sampled if outcome.logprob is not None]
    if told:
        _tell(result.logprobs, told)
    told = [entry for outcome in outcomes for entry in outcome.prompt_logprobs]
    if told:
        _tell(result.prompt_logprobs, told)


def _tell(out: pb.Logprobs, entries: list[tuple[Logprob | None, int]]) -> None:
    """As many alternatives for each as the greediest wants. Those beyond an entry's own are wrong: none may be sent."""
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
