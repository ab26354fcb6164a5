"""Recorded arrivals: Mooncake's JSON lines and Azure's CSV, read once into arrays.

Owns both formats and the errors for a bad line. A Mooncake line is `{"timestamp": ms, "input_length": n,
"output_length": n, "hash_ids": [...]}` with one id per 512 tokens of the prompt. Equal ids stand for equal tokens
behind equal prefixes. An Azure line is `TIMESTAMP,ContextTokens,GeneratedTokens`. Tokens are derived from the ids, so
requests of one trace share the prefixes that the trace records; tokens without an id belong to one request alone.

**Synthetic traces** in Mooncake's format have the size and the shape of the published one: conversations with turns
that repeat all blocks of the turns before, a few system prompts, heavy-tailed inputs of 8.6 k tokens on average,
outputs of 180, 23,608 requests in an hour. The published trace is not part of this repository, so figures from this one
resemble the published trace's but do not equal them.
"""

import csv
import itertools
import json
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, TextIO, cast

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.messages.arrays import Int32Array, Int64Array
from scheduler_svc.simulator.workload import BLOCK_SPACE, MAX_TOKENS, OWN_SPACE, Arrival, tokens_of
from tandem_contract.plural import counted, numbered

BLOCK_TOKENS = 512
_MAX_ID = 1 << 48
_MAX_LINE = 1 << 20
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MAX_SECONDS = 1e9


class TraceFormat(StrEnum):
    """The format of a file of arrivals."""

    MOONCAKE = "mooncake"
    AZURE = "azure"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """`at` float64[n] are seconds since the first arrival, ascending. `inputs` and `outputs` int64[n] are tokens.

    Request i has the block ids `blocks[block_ends[i - 1]:block_ends[i]]`.
    """

    name: str
    at: npt.NDArray[np.float64]
    inputs: Int64Array
    outputs: Int64Array
    block_ends: Int64Array
    blocks: Int64Array
    num_tenants: int = 1
    """Traces record no tenants."""

    @property
    def num_requests(self) -> int:
        """How many requests the trace has."""
        return len(self.at)

    @property
    def own_rate(self) -> float:
        """The recorded mean rate, 0 if all requests arrived at once."""
        span = float(self.at[-1])
        return (self.num_requests - 1) / span if span > 0 else 0.0

    @property
    def shared_blocks(self) -> float:
        """The share of blocks that repeat an earlier block of any request."""
        return 1 - len(np.unique(self.blocks)) / len(self.blocks) if len(self.blocks) else 0.0

    @property
    def description(self) -> str:
        """Size, length and mean lengths of the trace, in one line."""
        return (
            f"{self.name}: {counted(self.num_requests, 'request')} in {self.at[-1]:,.0f} s; "
            f"{self.inputs.mean():,.0f} tokens in "
            f"and {self.outputs.mean():,.0f} out on average; {self.shared_blocks:.1%} of its blocks are repeated"
        )

    def arrivals(self, rate: float, vocab_size: int) -> Iterator[Arrival]:
        """Yields the arrivals with all recorded gaps scaled by one factor."""
        scale = self.own_rate / rate if rate else 0.0
        for i in range(self.num_requests):
            yield Arrival(
                at=float(self.at[i]) * scale, prompt=self._prompt(i, vocab_size), output_tokens=int(self.outputs[i])
            )

    def _prompt(self, i: int, vocab_size: int) -> Int32Array:
        length = int(self.inputs[i])
        ids = self.blocks[self.block_ends[i - 1] if i else 0 : self.block_ends[i]]
        tokens = tokens_of(BLOCK_SPACE | ids, BLOCK_TOKENS, vocab_size)[:length]
        if len(tokens) == length:
            return tokens
        rest = tokens_of(np.array([OWN_SPACE | i]), length - len(tokens), vocab_size)
        return np.concatenate([tokens, rest])


# Seconds, input tokens, output tokens, block ids.
_Row = tuple[float, int, int, list[int]]


def read_trace(path: Path, form: TraceFormat | None = None, limit: int | None = None) -> Trace:
    """Returns the first `limit` requests, sorted by time. Raises OSError, and ValueError with the line's number."""
    at, inputs, outputs, counts, blocks = array("d"), array("q"), array("q"), array("q"), array("q")
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            read = _azure_rows if (form or _format_of(file)) is TraceFormat.AZURE else _mooncake_rows
            for seconds, tokens_in, tokens_out, block_ids in itertools.islice(read(str(path), file), limit):
                at.append(seconds)
                inputs.append(tokens_in)
                outputs.append(tokens_out)
                counts.append(len(block_ids))
                blocks.extend(block_ids)
        except UnicodeDecodeError:
            raise ValueError(f"{path} is not UTF-8 text") from None
    if not at:
        raise ValueError(f"{path} has no requests")
    # Requests with equal times keep their order.
    order = np.argsort(at, kind="stable")
    ends = np.cumsum(counts)
    ids = np.array(blocks)
    if not (order[:-1] < order[1:]).all():
        ids = np.concatenate([ids[ends[i] - counts[i] : ends[i]] for i in order])
    return Trace(
        name=path.name,
        at=np.array(at)[order] - min(at),
        inputs=np.array(inputs)[order],
        outputs=np.array(outputs)[order],
        block_ends=np.cumsum(np.array(counts)[order]),
        blocks=ids,
    )


def _format_of(file: TextIO) -> TraceFormat:
    first = file.readline(_MAX_LINE).strip()
    file.seek(0)
    return TraceFormat.MOONCAKE if first.startswith("{") else TraceFormat.AZURE


def _lines(name: str, file: TextIO) -> Iterator[tuple[int, str]]:
    """Yields lines and their numbers from 1 on, skipping empty lines."""
    number = 0
    while line := file.readline(_MAX_LINE):
        number += 1
        if len(line) == _MAX_LINE:
            raise ValueError(f"{name}, line {number}: it is longer than {_MAX_LINE} characters")
        if line.strip():
            yield number, line


def _mooncake_rows(name: str, file: TextIO) -> Iterator[_Row]:
    for number, line in _lines(name, file):
        where = f"{name}, line {number}"
        try:
            value: object = json.loads(line)
        except (ValueError, RecursionError):
            raise ValueError(f"{where}: it is not JSON") from None
        if not isinstance(value, dict):
            raise ValueError(f"{where}: it is not a JSON object")
        fields = cast(dict[str, Any], value)
        at = fields.get("timestamp")
        if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at <= 1e3 * _MAX_SECONDS:
            raise ValueError(f"{where}: timestamp is {_shown(at)}; it must be a number of milliseconds from 0 on")
        inputs, outputs = (_count(where, key, fields.get(key)) for key in ("input_length", "output_length"))
        yield at / 1e3, inputs, outputs, _ids(where, fields.get("hash_ids"), inputs)


def _ids(where: str, value: object, inputs: int) -> list[int]:
    """Returns one id per block. The last block may lack its id if it is not full."""
    if not isinstance(value, list):
        raise ValueError(f"{where}: hash_ids is {_shown(value)}; it must be a list")
    ids = cast(list[object], value)
    for number in ids:
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < _MAX_ID:
            raise ValueError(f"{where}: hash_ids has {_shown(number)}; it must be a number from 0 to {_MAX_ID - 1}")
    low, high = inputs // BLOCK_TOKENS, math.ceil(inputs / BLOCK_TOKENS)
    if not low <= len(ids) <= high:
        blocks = str(high) if low == high else f"{low} or {high}"
        raise ValueError(
            f"{where}: it has {len(ids)} hash_ids for {numbered(inputs, 'token')}; "
            f"blocks of {BLOCK_TOKENS} tokens make {blocks}"
        )
    return cast(list[int], ids)


def _azure_rows(name: str, file: TextIO) -> Iterator[_Row]:
    lines = _lines(name, file)
    first = next(lines, None)
    if first is None:
        return
    number, header = first
    columns = [column.strip().lstrip("\ufeff") for column in header.split(",")]
    missing = [column for column in _AZURE_COLUMNS if column not in columns]
    if missing:
        raise ValueError(
            f"{name}, line {number}: it has no column {', '.join(missing)}; "
            f"it is neither {','.join(_AZURE_COLUMNS)} nor JSON lines"
        )
    places = [columns.index(column) for column in _AZURE_COLUMNS]
    for number, line in lines:
        where = f"{name}, line {number}"
        cells = next(csv.reader([line]))
        if len(cells) != len(columns):
            raise ValueError(f"{where}: it has {numbered(len(cells), 'cell')}; the header has {len(columns)}")
        at, inputs, outputs = (cells[place].strip() for place in places)
        counts = (("ContextTokens", inputs), ("GeneratedTokens", outputs))
        tokens_in, tokens_out = (_count(where, name, _whole(text)) for name, text in counts)
        yield _seconds(where, at), tokens_in, tokens_out, []


def _seconds(where: str, text: str) -> float:
    """Parses `2023-11-16 18:15:46.6805900`, with or without a zone. The fraction may have seven digits."""
    whole, _, rest = text.partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    try:
        moment = datetime.fromisoformat(whole + rest[len(digits) :])
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return moment.timestamp() + (float(f"0.{digits}") if digits else 0.0)
    except ValueError:
        raise ValueError(f"{where}: TIMESTAMP is {_shown(text)}; it must be like 2023-11-16 18:15:46.680") from None


def _whole(text: str) -> object:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else text


def _count(where: str, name: str, value: object) -> int:
    """Returns the count, at least 1, because public traces contain requests of 0 tokens."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_TOKENS:
        raise ValueError(f"{where}: {name} is {_shown(value)}; it must be a number from 0 to {MAX_TOKENS}")
    return max(1, value)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


REQUESTS = 23_608
SECONDS = 3600.0
_SYSTEM_PROMPTS, _SYSTEM_BLOCKS = 8, 2
# The share of requests that continue a conversation, and of conversations that start with a system prompt.
_FOLLOW_SHARE, _SYSTEM_SHARE = 0.42, 0.5
# Conversations that may still continue.
_OPEN = 600
_MAX_INPUT, _MAX_OUTPUT = 120_000, 2_000
# Lognormal mean and sigma of the new tokens of a first turn, of a later turn, and of an output.
_FIRST, _LATER, _OUTPUT = (6_450.0, 1.15), (1_900.0, 1.0), (186.0, 0.9)


def write_trace(path: Path, *, requests: int = REQUESTS, seconds: float = SECONDS, seed: int = 0) -> None:
    """Writes one line per request, in order of time. Raises OSError, FileExistsError if the file exists."""
    rng = np.random.default_rng([seed, requests])
    moments = np.sort(rng.uniform(0, 1e3 * seconds, requests)).astype(np.int64)
    next_id = _SYSTEM_PROMPTS * _SYSTEM_BLOCKS
    # The block ids of each conversation, the newest last.
    conversations: list[list[int]] = []
    with path.open("x", encoding="utf-8") as file:
        for moment in moments.tolist():
            # The newest conversations are the likeliest to continue.
            back = min(len(conversations), 1 + int(rng.exponential(_OPEN / 4)))
            room = _MAX_INPUT - BLOCK_TOKENS * len(conversations[-back]) if back else 0
            follows = room > 0 and rng.random() < _FOLLOW_SHARE
            if not follows:
                conversations = [*conversations[1 - _OPEN :], _system_blocks(rng)]
            blocks = conversations[-back if follows else -1]
            shared = BLOCK_TOKENS * len(blocks)
            fresh = _length(rng, _LATER if follows else _FIRST, _MAX_INPUT - shared)
            blocks += range(next_id, next_id + -(-fresh // BLOCK_TOKENS))
            next_id += -(-fresh // BLOCK_TOKENS)
            line = {
                "timestamp": moment,
                "input_length": shared + fresh,
                "output_length": _length(rng, _OUTPUT, _MAX_OUTPUT),
                "hash_ids": blocks,
            }
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


def _system_blocks(rng: np.random.Generator) -> list[int]:
    if rng.random() >= _SYSTEM_SHARE:
        return []
    first = int(rng.integers(_SYSTEM_PROMPTS)) * _SYSTEM_BLOCKS
    return list(range(first, first + _SYSTEM_BLOCKS))


def _length(rng: np.random.Generator, shape: tuple[float, float], limit: int) -> int:
    mean, sigma = shape
    return int(min(limit, max(1.0, float(rng.lognormal(math.log(mean) - sigma * sigma / 2, sigma)))))
