"""Builds step plans by hand, for tests of their receivers.

Owns the wire layout of a plan from the sender's side, and a sender's copy of the row tables. It checks nothing, so a
test can build a wrong plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from tandem.internal.v1 import worker_pb2 as pb

from tests.rigs.row_tables import table_checksum
from tests.rigs.sampling import Settings


def int32(values: Sequence[int]) -> bytes:
    return np.array(values, dtype="<i4").tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Started:
    row: int
    tokens: Sequence[int]
    pages: Sequence[int]
    first: int = 0
    # All its tokens are prompt unless this is given.
    num_prompt: int | None = None
    banned_until: int = 0
    banned: Sequence[int] = ()
    num_logprobs: int = 0
    prompt_logprobs_from: int = 0
    settings: Settings


_OPTIONS = {each.name for each in fields(_Started)}


@dataclass(slots=True)
class _Draft:
    started: list[_Started] = field(default_factory=list)
    appends: list[tuple[int, int]] = field(default_factory=list)
    chunks: list[tuple[int, int, int, bool]] = field(default_factory=list)
    decode_rows: list[int] = field(default_factory=list)
    zero_pages: list[int] = field(default_factory=list)
    saves: list[tuple[int, int]] = field(default_factory=list)
    loads: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int, int]] = field(default_factory=list)


class PlanBuilder:
    """Collects one plan at a time. `build` returns it and begins the next."""

    def __init__(self, *, generation: int = 1) -> None:
        self._generation = generation
        self._step = 0
        self._tables: dict[int, tuple[int, list[int]]] = {}
        self._draft = _Draft()

    def start(self, row: int, tokens: Sequence[int], pages: Sequence[int], **options: Any) -> "PlanBuilder":
        """Starts a row, which still needs a chunk or a decode. Options: of `_Started`; the others are its settings."""
        own = {name: options.pop(name) for name in _OPTIONS & options.keys()}
        started = _Started(row=row, tokens=tokens, pages=pages, settings=Settings(**options), **own)
        self._draft.started.append(started)
        self._tables[row] = (started.first, list(pages))
        return self

    def append(self, row: int, page: int) -> "PlanBuilder":
        self._draft.appends.append((row, page))
        position, pages = self._tables.get(row, (0, []))
        self._tables[row] = (position, [*pages, page])
        return self

    def chunk(self, row: int, start: int, count: int, *, samples: bool) -> "PlanBuilder":
        self._draft.chunks.append((row, start, count, samples))
        self._tables[row] = (start + count, self._tables.get(row, (0, []))[1])
        return self

    def decode(self, *rows: int) -> "PlanBuilder":
        for row in rows:
            self._draft.decode_rows.append(row)
            position, pages = self._tables.get(row, (0, []))
            self._tables[row] = (position + 1, pages)
        return self

    def zero(self, *pages: int) -> "PlanBuilder":
        self._draft.zero_pages.extend(pages)
        return self

    def save(self, page: int, slot: int) -> "PlanBuilder":
        self._draft.saves.append((page, slot))
        return self

    def load(self, page: int, slot: int) -> "PlanBuilder":
        self._draft.loads.append((page, slot))
        return self

    def copy(self, source: int, target: int, count: int) -> "PlanBuilder":
        self._draft.copies.append((source, target, count))
        return self

    def build(self) -> pb.StepPlan:
        draft, self._draft = self._draft, _Draft()
        self._step += 1
        plan = pb.StepPlan(generation=self._generation, step=self._step, checksum=table_checksum(self._tables))
        rows, started = draft.started, plan.started
        started.rows = int32([one.row for one in rows])
        started.num_tokens = int32([len(one.tokens) for one in rows])
        started.tokens = int32([token for one in rows for token in one.tokens])
        started.num_pages = int32([len(one.pages) for one in rows])
        started.pages = int32([page for one in rows for page in one.pages])
        started.first_position = int32([one.first for one in rows])
        prompts = [len(one.tokens) if one.num_prompt is None else one.num_prompt for one in rows]
        started.num_prompt_tokens = int32(prompts)
        samplings = [one.settings.encoded() for one in rows]
        started.sampling = b"".join(samplings)
        started.num_sampling_bytes = int32([len(sampling) for sampling in samplings])
        started.sample_idx = int32([one.settings.sample_idx for one in rows])
        started.banned_until = int32([one.banned_until for one in rows])
        started.num_banned = int32([len(one.banned) for one in rows])
        started.banned = int32([token for one in rows for token in one.banned])
        # These fields are empty if no row uses them.
        for name in ("num_logprobs", "prompt_logprobs_from"):
            if any(values := [getattr(one, name) for one in rows]):
                setattr(started, name, int32(values))
        plan.appends.rows = int32([row for row, _ in draft.appends])
        plan.appends.pages = int32([page for _, page in draft.appends])
        plan.chunks.rows = int32([chunk[0] for chunk in draft.chunks])
        plan.chunks.starts = int32([chunk[1] for chunk in draft.chunks])
        plan.chunks.counts = int32([chunk[2] for chunk in draft.chunks])
        plan.chunks.samples = bytes(chunk[3] for chunk in draft.chunks)
        plan.decode_rows = int32(draft.decode_rows)
        plan.zero_pages = int32(draft.zero_pages)
        for name, moves in (("saves", draft.saves), ("loads", draft.loads)):
            if moves:
                getattr(plan, name).pages = int32([page for page, _ in moves])
                getattr(plan, name).slots = int32([slot for _, slot in moves])
        if draft.copies:
            plan.copies.sources = int32([source for source, _, _ in draft.copies])
            plan.copies.targets = int32([target for _, target, _ in draft.copies])
            plan.copies.counts = int32([count for _, _, count in draft.copies])
        return plan
