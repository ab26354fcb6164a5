"""Journal records as bytes: encodes what the core did, and decodes a request. Owns no state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from tandem.internal.v1 import frontend_pb2, journal_pb2

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.arrays import Int32Array
from scheduler_svc.core.messages.effects import WeightsSpan
from scheduler_svc.core.messages.operators import Weights
from scheduler_svc.wire import frontend as frontend_wire
from scheduler_svc.wire.arrays import WireError, array, packed
from scheduler_svc.wire.request import end_of as decoded_end
from scheduler_svc.wire.request import fill_end, fill_spans, fill_submit, spans_of
from tandem_contract.plural import numbered

_NO_TOKENS = np.zeros(0, np.int32)
_NO_SPANS: Mapping[int, Sequence[WeightsSpan]] = {}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleEnd:
    """How a sample ended, and when (journal's clock)."""

    end: fx.End
    at: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavedRequest:
    """A request in the journal, with all that is known of it."""

    number: int
    accepted_at: float
    """By the journal's clock."""
    submit: ev.Submit
    """Without front end and page hashes."""
    outputs: tuple[Int32Array, ...]
    """The output of each sample."""
    ends: tuple[SampleEnd | None, ...]
    """The end of each sample, None if it lives."""
    weights: tuple[tuple[WeightsSpan, ...], ...]
    """The spans by weights of each sample's output."""

    @property
    def numbers(self) -> range:
        """The numbers of its samples."""
        return range(self.number, self.number + self.submit.num_samples)


def kept_submit(submit: ev.Submit, ends: Sequence[SampleEnd | None]) -> ev.Submit:
    """Returns what is kept of a Submit: if all samples have ended, nobody needs its resources any more."""
    if not submit.resources or not all(ends):
        return submit
    return replace(submit, resources=())


def fill_weights(state: journal_pb2.JournalState, weights: Weights | None) -> None:
    """Fills in the newest weights, if there are some."""
    if weights is not None:
        state.weights_version, state.weights_folder = weights.version, weights.folder


def state_record(state: journal_pb2.JournalState) -> bytes:
    """Encodes a JournalState."""
    return journal_pb2.JournalRecord(state=state).SerializeToString()


def request_record(
    number: int,
    accepted_at: float,
    submit: ev.Submit,
    outputs: Sequence[Int32Array] = (),
    ends: Sequence[SampleEnd | None] = (),
    weights: Mapping[int, Sequence[WeightsSpan]] = _NO_SPANS,
) -> bytes:
    """Encodes a JournalRequest. `outputs` and `ends` are empty when it is accepted. `weights` has those of samples."""
    record = journal_pb2.JournalRecord()
    request = record.request
    request.number, request.accepted_at = number, accepted_at
    fill_submit(request.submit, submit)
    for i, (tokens, end) in enumerate(zip(outputs, ends, strict=True)):
        sample = request.samples.add(tokens=packed(tokens))
        if end is not None:
            _fill_end(sample.end, number + i, end)
        fill_spans(sample.weights, weights.get(i, ()))
    return record.SerializeToString()


def tokens_record(
    numbers: npt.NDArray[np.uint64], offsets: Int32Array, tokens: Int32Array, weights_version: str = ""
) -> bytes:
    """Encodes a JournalTokens."""
    arrays = journal_pb2.JournalTokens(
        numbers=packed(numbers), offsets=packed(offsets), tokens=packed(tokens), weights_version=weights_version
    )
    return journal_pb2.JournalRecord(tokens=arrays).SerializeToString()


def end_record(number: int, end: SampleEnd) -> bytes:
    """Encodes a JournalEnd of the sample with this number."""
    record = journal_pb2.JournalRecord()
    _fill_end(record.end, number, end)
    return record.SerializeToString()


def forgotten_record(number: int) -> bytes:
    """Encodes a JournalForgotten of the request whose first sample has this number."""
    return journal_pb2.JournalRecord(forgotten=journal_pb2.JournalForgotten(number=number)).SerializeToString()


def _fill_end(out: journal_pb2.JournalEnd, number: int, end: SampleEnd) -> None:
    out.number, out.ended_at = number, end.at
    fill_end(out.end, end.end)


def end_of(record: journal_pb2.JournalEnd) -> SampleEnd:
    """Decodes a JournalEnd. Raises WireError."""
    return SampleEnd(end=decoded_end(record.end), at=record.ended_at)


def request_of(record: journal_pb2.JournalRequest) -> SavedRequest:
    """Decodes a JournalRequest. Raises WireError."""
    message = frontend_pb2.FrontendToCore(submit=record.submit)
    submit = frontend_wire.event_of(message, "")
    assert isinstance(submit, ev.Submit)
    samples = record.samples
    if samples and len(samples) != submit.num_samples:
        raise WireError(f"a request has {numbered(submit.num_samples, 'sample')}, but {len(samples)} in the record")
    none: tuple[Any, ...] = (None,) * submit.num_samples
    return SavedRequest(
        number=record.number,
        accepted_at=record.accepted_at,
        submit=submit,
        outputs=tuple(array(sample.tokens, np.int32, "tokens") for sample in samples)
        or (_NO_TOKENS,) * submit.num_samples,
        ends=tuple(end_of(sample.end) if sample.HasField("end") else None for sample in samples) or none,
        weights=tuple(spans_of(sample.weights) for sample in samples) or ((),) * submit.num_samples,
    )
