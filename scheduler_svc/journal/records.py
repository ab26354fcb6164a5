"""What the journal keeps of a request, and the records of it as bytes. Owns no state."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tandem.internal.v1 import journal_pb2

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.arrays import NO_IDS, Int32Array
from scheduler_svc.core.messages.operators import QuarantineEntry
from scheduler_svc.wire.frontend import END, SPAN, SUBMIT
from tandem_contract.bounds import WireError
from tandem_contract.codec import Codec, array, packed
from tandem_contract.plural import numbered


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
    outputs: tuple[Int32Array, ...] = ()
    """The output of each sample; empty, like the next two, in the record of a request that is accepted."""
    ends: tuple[SampleEnd | None, ...] = ()
    """The end of each sample, None if it lives."""
    weights: tuple[tuple[fx.WeightsSpan, ...], ...] = ()
    """The spans by weights of each sample's output."""

    @property
    def numbers(self) -> range:
        """The numbers of its samples."""
        return range(self.number, self.number + self.submit.num_samples)


def kept_submit(submit: ev.Submit, ends: Sequence[SampleEnd | None]) -> ev.Submit:
    """Returns what is kept of a Submit: if all samples have ended, its resources are not needed any more."""
    if not submit.resources or not all(ends):
        return submit
    return replace(submit, resources=())


def _submit(request: SavedRequest) -> dict[str, Any]:
    """Page hashes can be computed again, and a stream means nothing after the front end."""
    return {name: one for name, one in SUBMIT.encode(request.submit).items() if name not in ("stream", "page_hashes")}


def _samples(request: SavedRequest) -> list[dict[str, Any]]:
    samples = zip(request.outputs, request.ends, request.weights, strict=True)
    return [
        {
            "tokens": packed(tokens),
            "end": None if end is None else end_arguments(request.number + i, end),
            "weights": list(map(SPAN.encode, spans)),
        }
        for i, (tokens, end, spans) in enumerate(samples)
    ]


def end_arguments(number: int, end: SampleEnd) -> dict[str, Any]:
    """Returns the arguments of the JournalEnd of the sample with this number."""
    return SAMPLE_END.encode(end) | {"number": number}


def _check_samples(request: SavedRequest) -> None:
    if len(request.outputs) != request.submit.num_samples:
        samples = numbered(request.submit.num_samples, "sample")
        raise WireError(f"a request has {samples}, but {len(request.outputs)} in the record")


def _none(request: journal_pb2.JournalRequest, nothing: Any) -> tuple[Any, ...]:
    """What is known of samples of which the record says nothing."""
    return () if request.samples else (nothing,) * request.submit.num_samples


SAMPLE_END = Codec(journal_pb2.JournalEnd, SampleEnd, names={"at": "ended_at"}, parts=(END,), other=("number",))
QUARANTINED = Codec(
    journal_pb2.JournalQuarantined, QuarantineEntry, given=("age_seconds", "expires_seconds"), other=("convicted_at",)
)
REQUEST = Codec(
    journal_pb2.JournalRequest,
    SavedRequest,
    made={
        "submit": lambda request: SUBMIT.decode(request.submit, frontend=""),
        "outputs": lambda request: (
            *(array(sample.tokens, np.int32, "tokens") for sample in request.samples),
            *_none(request, NO_IDS),
        ),
        "ends": lambda request: (
            *(SAMPLE_END.decode(sample.end) if sample.HasField("end") else None for sample in request.samples),
            *_none(request, None),
        ),
        "weights": lambda request: (
            *(tuple(map(SPAN.decode, sample.weights)) for sample in request.samples),
            *_none(request, ()),
        ),
    },
    sent={"submit": _submit, "samples": _samples},
    check=_check_samples,
)


def record(**one: Any) -> bytes:
    """Encodes a JournalRecord that has this message, by its name there."""
    return journal_pb2.JournalRecord(**one).SerializeToString()
