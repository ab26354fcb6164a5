"""Checks the result of a step, applies it, and collects the output for front ends: tokens, and one end per request.

The stored record of the plan says which request each row had. If the row still has that request, its token is appended
there. If the request was preempted meanwhile, the token is appended to the waiting request as a pending token. If the
request has ended, the token is dropped. A worker that sends an invalid result must join again, and no part of the
result is used.

A step makes one effect per front end, independent of its number of rows; terminal answers follow the step's tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.messages.arrays import Int32Array, RowIndex, index_of, is_any_of, is_within
from scheduler_svc.core.messages.effects import Effect, End, Logprobs, PromptLogprobs, StepOutput, TokenLogprobs
from scheduler_svc.core.messages.events import ConstraintsOfStep, RawLogprobs, StepDone
from scheduler_svc.core.messages.plan import SentPlan
from scheduler_svc.core.queue.request_queue import RequestQueue
from scheduler_svc.core.schedule.endings import Ending, Outcomes, ending_of
from scheduler_svc.core.schedule.plan_builder import DETACHED
from scheduler_svc.core.state.lane import Lane, cache_full_pages
from scheduler_svc.core.state.request import Request


def is_valid(event: StepDone, record: SentPlan, vocab_size: int) -> bool:
    """Returns whether the result has a valid token for each sampled row, the wanted logprobs and the wanted pool.

    Values of rows with logits that are not finite, and tokens of rows with a failed constraint, are not checked.
    """
    if event.pool_id != record.takes_over:
        return False
    num_sampled = len(record.sampled)
    if len(event.tokens) != num_sampled or not is_within(event.nonfinite, num_sampled):
        return False
    if not _has_wanted_logprobs(record, event, vocab_size):
        return False
    meaningless = event.nonfinite
    if event.constraints is not None:
        if not _fits_constraints(event.constraints, record):
            return False
        meaningless = np.concatenate([meaningless, event.constraints.failed])
    if not len(meaningless):
        return is_within(event.tokens, vocab_size)
    return is_within(np.delete(event.tokens, meaningless), vocab_size)


def _fits_constraints(constraints: ConstraintsOfStep, record: SentPlan) -> bool:
    """Returns whether only rows with a constraint are named, and none both as complete and as failed."""
    named, constrained = np.concatenate([constraints.complete, constraints.failed]), record.constrained
    if constrained is None or not is_within(named, len(constrained)):
        return False
    return bool(constrained[named].all()) and len(np.unique(named)) == len(named)


def _has_wanted_logprobs(record: SentPlan, event: StepDone, vocab_size: int) -> bool:
    """Returns whether the result has exactly the logprobs that its plan asked for.

    Logprobs may be NaN and token ids invalid only for rows with logits that are not finite.
    """
    wanted_pieces, prompt = record.wanted_prompt_logprobs, event.prompt_logprobs
    if record.num_logprobs is None and not wanted_pieces:
        return not len(event.logprobs.logprobs) and not len(prompt.logprobs)
    prompt_top_k = max((piece.top_k for piece in wanted_pieces), default=0)
    ignored = np.flatnonzero(np.isnan(prompt.logprobs)).tolist()
    if not _fits(prompt, sum(piece.count for piece in wanted_pieces), prompt_top_k, vocab_size, ignored):
        return False
    if record.num_logprobs is None:
        return not len(event.logprobs.logprobs)
    is_wanted = record.num_logprobs > 0
    nonfinite = event.nonfinite[is_wanted[event.nonfinite]]
    ignored = (np.cumsum(is_wanted)[nonfinite] - 1).tolist()
    return _fits(event.logprobs, int(is_wanted.sum()), int(record.num_logprobs.max()) - 1, vocab_size, ignored)


def _fits(raw: RawLogprobs, count: int, top_k: int, vocab_size: int, ignored: Sequence[int]) -> bool:
    cells = count * top_k
    if (len(raw.logprobs), len(raw.top_token_ids), len(raw.top_logprobs)) != (count, cells, cells):
        return False
    if not count:
        return True
    ids = raw.top_token_ids
    if np.isnan(np.delete(raw.logprobs, ignored)).any():
        return False
    if len(ignored):
        ids = np.delete(ids.reshape(count, top_k), ignored, axis=0)
    return raw.top_k == top_k and (not ids.size or (int(ids.min()) >= 0 and int(ids.max()) < vocab_size))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepTokens:
    """The tokens of one step: `frontend_idx` int32[n], `streams` uint64[n], `offsets` and `tokens` int32[n]."""

    frontend_idx: Int32Array
    streams: npt.NDArray[np.uint64]
    offsets: Int32Array
    tokens: Int32Array
    endings: list[Ending]
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()


def read_result(
    *,
    lane: Lane,
    queue: RequestQueue,
    record: SentPlan,
    event: StepDone,
    frontend_idx: Mapping[str, int],
    now: float,
) -> StepTokens:
    """Applies a valid result of a successful step."""
    rows, tokens = lane.rows, event.tokens
    named, at = record.rows, record.index
    mine = rows.handle[at] == record.handles
    all_mine = np.count_nonzero(mine) == len(mine)  # a fraction of the time of `mine.all()`
    rows.confirm(at if all_mine else named[mine], record.ends if all_mine else record.ends[mine])
    # Live requests that lost their row after the plan was made have one pending plan less.
    for handle in () if all_mine else record.handles[~mine].tolist():
        if (request := queue.by_handle(handle)) is not None:
            request.pending_plans -= 1

    is_usual = not len(event.nonfinite) and event.constraints is None
    if all_mine and not record.prefill_tokens and is_usual and record.num_logprobs is None:
        # The common step: all rows decode, still have the requests of the plan, and have finite logits.
        return _seated(lane, queue, named, at, tokens, now)
    outcomes = Outcomes(event)
    sampled_rows, sampled_mine = named[record.sampled], mine[record.sampled]
    good = sampled_mine & outcomes.is_good
    failed = np.flatnonzero(sampled_mine & ~outcomes.is_good)
    prompt_logprobs, not_finite = _prompt_logprobs(queue, record, event.prompt_logprobs)
    is_complete = None if outcomes.is_complete is None else outcomes.is_complete[good]
    good_rows = sampled_rows[good]
    step_tokens = _seated(lane, queue, good_rows, index_of(good_rows), tokens[good], now, is_complete)
    rows.drop_sampled(sampled_rows[failed])
    endings = step_tokens.endings
    endings += [outcomes.failure(i, rows.request_at(int(sampled_rows[i]))) for i in failed.tolist()]
    sampled = np.flatnonzero(good)
    if not all_mine:
        pending, ended = _pending(lane, queue, record, tokens, outcomes, ~sampled_mine, frontend_idx, now)
        endings += ended
        step_tokens, sampled = _joined(step_tokens, sampled, pending)
    if not_finite:
        # These requests fail even if the step's token ends them, because logprobs that they asked for are missing.
        failed = {request.handle for request in not_finite}
        endings = [ending for ending in endings if ending.request.handle not in failed]
        endings += map(Ending.not_finite, not_finite)
    logprobs = entry_logprobs(record, event.logprobs, sampled)
    return replace(step_tokens, endings=endings, logprobs=logprobs, prompt_logprobs=prompt_logprobs)


def _seated(
    lane: Lane,
    queue: RequestQueue,
    rows_s: npt.NDArray[np.int64],
    at: RowIndex,
    tokens: Int32Array,
    now: float,
    is_complete: npt.NDArray[np.bool_] | None = None,
) -> StepTokens:
    """Applies the tokens of rows that still have the requests of the plan. at: their index; `is_complete` as in
    `Outcomes`."""
    rows = lane.rows
    verified, known = rows.add_sampled(rows_s, at, tokens)
    if rows.num_metered:
        queue.accounts.made(rows.meter[at], now)
    offsets = known - rows.prompt[at]
    offsets -= 1
    if np.count_nonzero(offsets) < len(offsets):
        for request in rows.requests_at(rows_s[offsets == 0]):
            request.first_token_at = now
    for row in rows_s[verified >= rows.cache_at[at]].tolist():
        cache_full_pages(lane, row)

    endings: list[Ending] = []
    may_end = known == rows.total[at]
    is_eos = is_any_of(tokens, lane.info.eos_token_ids)
    may_stop = is_eos | rows.has_stops[at]
    if np.count_nonzero(may_stop):
        is_eos &= ~rows.ignore_eos[at]
        may_end |= (is_eos | rows.has_stops[at]) & (known > rows.min_known[at])
    if is_complete is not None:
        may_end |= is_complete
    for i in may_end.nonzero()[0].tolist():
        request, completes = rows.request_at(int(rows_s[i])), is_complete is not None and bool(is_complete[i])
        token, longest = int(tokens[i]), int(rows.total[rows_s[i]])
        ending = ending_of(request, token, int(known[i]), bool(is_eos[i]), is_complete=completes, longest=longest)
        if ending is not None:
            endings.append(ending)
    return StepTokens(
        frontend_idx=rows.frontend_idx[rows_s],
        streams=rows.stream[rows_s],
        offsets=offsets,
        tokens=tokens,
        endings=endings,
    )


def _pending(
    lane: Lane,
    queue: RequestQueue,
    record: SentPlan,
    tokens: Int32Array,
    outcomes: Outcomes,
    is_pending: npt.NDArray[np.bool_],
    frontend_idx: Mapping[str, int],
    now: float,
) -> tuple[list[tuple[int, int, int, int, int]], list[Ending]]:
    """Applies pending tokens of preempted requests.

    Returns for each token its front end, stream, offset, token and index among sampled rows; and the requests that end.
    """
    delivered: list[tuple[int, int, int, int, int]] = []
    endings: list[Ending] = []
    info = lane.info
    for i in np.flatnonzero(is_pending).tolist():
        request = queue.by_handle(int(record.handles[record.sampled[i]]))
        if request is None:
            continue
        request.take_pending_token()
        if not outcomes.is_good[i]:
            endings.append(outcomes.failure(i, request))
            continue
        token = int(tokens[i])
        if request.known == request.prompt_tokens:
            request.first_token_at = now
        reader = frontend_idx.get(request.frontend, DETACHED)
        delivered.append((reader, request.stream, request.num_outputs, token, i))
        queue.add_pending_token(request, token)
        if request.meter:
            queue.accounts.made(np.array([request.meter], np.int32), now)
        is_eos = not request.submit.ignore_eos and token in info.eos_token_ids
        is_complete = outcomes.is_complete is not None and bool(outcomes.is_complete[i])
        longest = info.longest_sequence
        ending = ending_of(request, token, request.known, is_eos, is_complete=is_complete, longest=longest)
        if ending is not None:
            endings.append(ending)
    return delivered, endings


def _prompt_logprobs(
    queue: RequestQueue, record: SentPlan, raw: RawLogprobs
) -> tuple[tuple[PromptLogprobs, ...], list[Request]]:
    """Counts the prompt logprobs of live requests as sent, and returns them, and those with values not finite."""
    pieces: list[PromptLogprobs] = []
    not_finite: list[Request] = []
    line = 0
    for wanted in record.wanted_prompt_logprobs:
        request = queue.by_handle(wanted.handle)
        if request is not None:
            values = _table(raw).at(slice(line, line + wanted.count), wanted.top_k)
            if np.isnan(values.logprobs).any():
                not_finite.append(request)
            else:
                request.prompt_logprobs_sent(wanted.start, wanted.count)
                reader, stream = request.frontend, request.stream
                pieces.append(PromptLogprobs(frontend=reader, stream=stream, start=wanted.start, values=values))
        line += wanted.count
    return tuple(pieces), not_finite


def _joined(
    first: StepTokens, sampled: npt.NDArray[np.int64], pending: Sequence[tuple[int, int, int, int, int]]
) -> tuple[StepTokens, npt.NDArray[np.int64]]:
    """Returns the tokens with the pending ones behind them, and their indices among the sampled rows."""
    if not pending:
        return first, sampled
    readers, streams, offsets, tokens, indices = zip(*pending, strict=True)
    joined = replace(
        first,
        frontend_idx=np.concatenate([first.frontend_idx, np.array(readers, np.int32)]),
        streams=np.concatenate([first.streams, np.array(streams, np.uint64)]),
        offsets=np.concatenate([first.offsets, np.array(offsets, np.int32)]),
        tokens=np.concatenate([first.tokens, np.array(tokens, np.int32)]),
    )
    return joined, np.concatenate([sampled, np.array(indices, np.int64)])


def entry_logprobs(record: SentPlan, raw: RawLogprobs, sampled: npt.NDArray[np.int64]) -> TokenLogprobs | None:
    """Returns logprobs for the entries of requests that asked for them, None without such a request.

    `sampled` int64[entries] has the index of each entry among the plan's sampled rows.
    """
    if record.num_logprobs is None:
        return None
    is_wanted = record.num_logprobs > 0
    entries = np.flatnonzero(is_wanted[sampled])
    if not len(entries):
        return None
    lines = (np.cumsum(is_wanted) - 1)[sampled[entries]]
    return TokenLogprobs(entries=entries.astype(np.int32), values=_table(raw).at(lines))


def _table(raw: RawLogprobs) -> Logprobs:
    shape = (len(raw.logprobs), raw.top_k)
    return Logprobs(
        logprobs=raw.logprobs,
        top_token_ids=raw.top_token_ids.reshape(shape),
        top_logprobs=raw.top_logprobs.reshape(shape),
    )


class OutputCollector:
    """Holds the terminal answers of the event that is being handled, by front end. It is empty between events.

    With `report_detached`, the output of requests without a reader is emitted too, for the front end "".
    """

    def __init__(self, *, report_detached: bool = False) -> None:
        self._others: dict[str, int] = {"": DETACHED} if report_detached else {}
        self._ends: dict[str, list[End]] = {}

    def add(self, frontend: str, end: End) -> None:
        """Adds a request's terminal answer."""
        self._ends.setdefault(frontend, []).append(end)

    def deliver(self, step_tokens: StepTokens, frontends: Mapping[str, int], weights_version: str = "") -> list[Effect]:
        """Takes the collected ends, and adds the step's tokens for each front end. `frontends` maps names to index."""
        effects: list[Effect] = []
        # Without a mask, which costs time, if all tokens are for the only front end.
        alone = len(frontends) == 1 and np.count_nonzero(step_tokens.frontend_idx) == len(step_tokens.frontend_idx)
        readers = {**frontends, **self._others} if self._others else frontends
        for frontend, idx in readers.items():
            ends = tuple(self._ends.pop(frontend, ()))
            gets_all = alone and idx != DETACHED
            mask = slice(None) if gets_all else step_tokens.frontend_idx == idx
            tokens = step_tokens.tokens[mask]
            logprobs, pieces = step_tokens.logprobs, step_tokens.prompt_logprobs
            if not gets_all:
                logprobs = None if logprobs is None else _of_some(logprobs, step_tokens.frontend_idx == idx)
                pieces = tuple(piece for piece in pieces if piece.frontend == frontend)
            if len(tokens) or pieces or ends:
                effects.append(
                    StepOutput(
                        frontend=frontend,
                        streams=step_tokens.streams[mask],
                        offsets=step_tokens.offsets[mask],
                        tokens=tokens,
                        logprobs=logprobs,
                        prompt_logprobs=pieces,
                        ends=ends,
                        weights_version=weights_version,
                    )
                )
        return effects

    def flush(self, frontends: Mapping[str, int]) -> list[Effect]:
        """Takes the collected ends that no step delivered. Ends without a connected front end are dropped."""
        if not self._ends:
            return []
        ends, self._ends = self._ends, {}
        return [
            StepOutput(frontend=frontend, ends=tuple(of))
            for frontend, of in ends.items()
            if frontend in frontends or frontend in self._others
        ]


def _of_some(all_logprobs: TokenLogprobs, chosen: npt.NDArray[np.bool_]) -> TokenLogprobs | None:
    """Returns the logprobs of the chosen entries; `entries` are then indices among the chosen ones."""
    mine = chosen[all_logprobs.entries]
    if not mine.any():
        return None
    places = np.cumsum(chosen) - 1
    return TokenLogprobs(
        entries=places[all_logprobs.entries[mine]].astype(np.int32), values=all_logprobs.values.at(mine)
    )
