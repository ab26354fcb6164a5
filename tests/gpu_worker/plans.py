"""Plans for a runner under test: a tiny core with rows and pages and without policy.

Owns a page counter and the row states that plans refer to; its checksum is computed from worker.proto's formula over
the whole tables each time, in plain Python, independent of the worker's incremental one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from tandem.internal.v1 import worker_pb2 as pb
from tandem.v1.inference_pb2 import SamplingParams

from gpu_worker.geometry import Geometry

MASK = (1 << 64) - 1
# Of a row's settings, those that a plan has fields of its own for; the last two are empty if no row asks for them.
RARE = ("num_logprobs", "prompt_logprobs_from")
PLAN_FIELDS = ("sample_idx", "banned_until", *RARE)
# A complete SamplingParams that is greedy and changes no logits.
OFF = SamplingParams(
    temperature=0, top_p=1, top_k=0, min_p=0, typical_p=1, seed=0, presence_penalty=0, frequency_penalty=0,
    repetition_penalty=1,
)  # fmt: skip


def mix(x: int) -> int:
    """worker.proto's MIX."""
    z = (x + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
    return z ^ z >> 31


def checksum(tables: dict[int, tuple[int, list[int]]]) -> int:
    """worker.proto's checksum of {row: (position, pages)}."""
    total = 0
    for row, (position, pages) in tables.items():
        total += position * (mix(row << 40 ^ 0xFFFFF) | 1)
        total += sum(mix((row << 40) ^ (i << 20) ^ page) for i, page in enumerate(pages))
    return total & MASK


@dataclass(kw_only=True)
class Sequence_:
    """A sequence of the tiny core."""

    row: int
    tokens: list[int]
    pages: list[int]
    position: int = 0
    sampling: dict[str, float] = field(default_factory=dict)
    banned: list[int] = field(default_factory=list)
    biases: dict[int, float] = field(default_factory=dict)
    allowed: list[int] = field(default_factory=list)
    num_prompt: int = 0
    started: bool = False

    @property
    def plan_fields(self) -> dict[str, float]:
        """The part of `sampling` that a plan has fields of its own for."""
        return {name: value for name, value in self.sampling.items() if name in PLAN_FIELDS}

    def params(self) -> SamplingParams:
        """As a front end makes them."""
        params = SamplingParams()
        params.CopyFrom(OFF)
        params.MergeFrom(SamplingParams(**{k: v for k, v in self.sampling.items() if k not in PLAN_FIELDS}))
        params.logit_bias.update({token: bias for token, bias in self.biases.items() if bias != -np.inf})
        params.banned_token_ids.extend(token for token, bias in self.biases.items() if bias == -np.inf)
        if self.allowed:
            params.allowed_token_ids.ids.extend(self.allowed)
        return params


def geometry_of(**sizes: int) -> Geometry:
    """A small one, in which `sizes` replace its own."""
    small = {"page_size": 16, "num_pages": 20, "max_rows": 4, "max_length": 100, "token_budget": 64}
    return Geometry(**{**small, "chunk_align": 16, "vocab_size": 50, **sizes})


def int32(values: Sequence[int]) -> bytes:
    """Packed little-endian int32."""
    return np.asarray(list(values), "<i4").tobytes()


@dataclass(frozen=True, kw_only=True)
class Moves:
    """Page orders: (page, slot) of saves and loads, pages to zero, (source, target, count) of copies."""

    saves: Sequence[tuple[int, int]] = ()
    zero: Sequence[int] = ()
    copies: Sequence[tuple[int, int, int]] = ()
    loads: Sequence[tuple[int, int]] = ()

    def write(self, plan: pb.StepPlan) -> None:
        plan.zero_pages = int32(self.zero)
        for message, pairs in ((plan.saves, self.saves), (plan.loads, self.loads)):
            message.pages, message.slots = int32([page for page, _ in pairs]), int32([slot for _, slot in pairs])
        columns = list(zip(*self.copies, strict=True)) or [(), (), ()]
        plan.copies.sources, plan.copies.targets, plan.copies.counts = map(int32, columns)


class TinyCore:
    """Builds plans in order; the caller chooses what runs."""

    def __init__(self, geometry: Geometry, *, generation: int = 1, page_order: Sequence[int] | None = None) -> None:
        self.geometry = geometry
        self.generation, self.step = generation, 0
        self.free_pages = list(page_order or range(1, geometry.num_pages))
        self.rows: dict[int, Sequence_] = {}

    def add(
        self,
        row: int,
        tokens: Sequence[int],
        *,
        shared: Sequence[int] = (),
        position: int = 0,
        banned: Sequence[int] = (),
        biases: Mapping[int, float] | None = None,
        allowed: Sequence[int] = (),
        num_prompt: int = 0,
        **sampling: float,
    ) -> Sequence_:
        """A sequence in `row`, with pages for its tokens, which are its prompt unless `num_prompt` is given.

        shared: its first pages, which come filled up to `position`, the first that is computed.
        """
        num_pages = -(-len(tokens) // self.geometry.page_size)
        pages = [*shared, *(self.free_pages.pop(0) for _ in range(num_pages - len(shared)))]
        sequence = Sequence_(
            row=row,
            tokens=list(tokens),
            pages=pages,
            position=position,
            sampling=sampling,
            banned=list(banned),
            biases=dict(biases or {}),
            allowed=list(allowed),
            num_prompt=num_prompt or len(tokens),
        )
        self.rows[row] = sequence
        return sequence

    def free(self, sequence: Sequence_) -> None:
        """Gives its pages back; the row keeps its table until it is started again."""
        self.free_pages.extend(sequence.pages)

    def plan(
        self,
        *,
        chunks: dict[int, int] | None = None,
        decode: Sequence[int] = (),
        moves: Moves | None = None,
        next_token: int = 0,
    ) -> pb.StepPlan:
        """One step: `chunks` {row: count} and `decode` rows; `next_token` replaces tokens that are not known yet."""
        chunks = chunks or {}
        self.step += 1
        message = pb.StepPlan(generation=self.generation, step=self.step)
        if moves is not None:
            moves.write(message)
        fresh = [self.rows[row] for row in (*chunks, *decode) if not self.rows[row].started]
        if fresh:
            message.started.CopyFrom(self._started(fresh))
        appends: list[tuple[int, int]] = []
        for row in (*chunks, *decode):
            sequence = self.rows[row]
            end = sequence.position + chunks.get(row, 1)
            while len(sequence.pages) * self.geometry.page_size < end:
                sequence.pages.append(self.free_pages.pop(0))
                appends.append((row, sequence.pages[-1]))
        message.appends.rows = int32([row for row, _ in appends])
        message.appends.pages = int32([page for _, page in appends])
        message.chunks.rows = int32(list(chunks))
        message.chunks.starts = int32([self.rows[row].position for row in chunks])
        message.chunks.counts = int32(list(chunks.values()))
        samples = [self.rows[row].position + count == len(self.rows[row].tokens) for row, count in chunks.items()]
        message.chunks.samples = bytes(samples)
        message.decode_rows = int32(decode)
        for row in (*chunks, *decode):
            self.rows[row].position += chunks.get(row, 1)
        self.sampled = [row for row, does in zip(chunks, samples, strict=True) if does] + list(decode)
        for row in self.sampled:
            self.rows[row].tokens.append(next_token)
        message.checksum = checksum({row: (s.position, s.pages) for row, s in self.rows.items() if s.started})
        return message

    def learn(self, outcome_tokens: Sequence[int], sampled: Sequence[int] | None = None) -> None:
        """Replaces the placeholders of `plan` with a result's tokens."""
        for row, token in zip(self.sampled if sampled is None else sampled, outcome_tokens, strict=True):
            self.rows[row].tokens[self.rows[row].position] = int(token)

    def _started(self, sequences: Sequence[Sequence_]) -> pb.StartedRows:
        def of(name: str) -> bytes:
            return int32([int(s.plan_fields.get(name, 0)) for s in sequences])

        samplings = [s.params().SerializeToString() for s in sequences]
        for sequence in sequences:
            sequence.started = True
        return pb.StartedRows(
            rows=int32([s.row for s in sequences]),
            num_tokens=int32([len(s.tokens) for s in sequences]),
            tokens=int32([token for s in sequences for token in s.tokens]),
            num_pages=int32([len(s.pages) for s in sequences]),
            pages=int32([page for s in sequences for page in s.pages]),
            first_position=int32([s.position for s in sequences]),
            sampling=b"".join(samplings),
            num_sampling_bytes=int32([len(sampling) for sampling in samplings]),
            sample_idx=of("sample_idx"),
            banned_until=of("banned_until"),
            num_banned=int32([len(s.banned) for s in sequences]),
            banned=int32([token for s in sequences for token in s.banned]),
            num_prompt_tokens=int32([s.num_prompt for s in sequences]),
            # Empty if no sequence asks for them.
            **{name: of(name) for name in RARE if any(name in s.plan_fields for s in sequences)},
        )
