"""What the journal keeps of a request, and the records of it as bytes. Owns no state."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tandem.internal.v1 import journal_pb2

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.arrays import NO_IDS, Int32Array
from scheduler_svc.core.messages.operators import QuarantineEntry
from scheduler_svc.wire.frontend import END, SPAN, SUBMIT
from tandem_contract.bounds import WireError
from tandem_contract.codec import Codec
from tandem_contract.plural import numbered


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleEnd:
    """How a sample ended, and when (journal's clock)."""

    end: fx.End
    at: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavedSample:
    """What is known of a sample: its output, its end (None if it lives), and the spans by weights of the output."""

    tokens: Int32Array = field(default_factory=lambda: NO_IDS)
    end: SampleEnd | None = None
    weights: tuple[fx.WeightsSpan, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavedRequest:
    """A request in the journal, with all that is known of it."""

    number: int
    accepted_at: float
    """By the journal's clock."""
    submit: ev.Submit
    """Without front end and page hashes."""
    samples: tuple[SavedSample, ...] = ()
    """Empty in the record of a request that is accepted."""

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
    samples = list(map(SAMPLE.encode, request.samples))
    for number, sample in zip(request.numbers, samples, strict=False):
        if sample["end"] is not None:
            sample["end"]["number"] = number
    return samples


def end_arguments(number: int, end: SampleEnd) -> dict[str, Any]:
    """Returns the arguments of the JournalEnd of the sample with this number."""
    return SAMPLE_END.encode(end) | {"number": number}


def _check_samples(request: SavedRequest) -> None:
    if len(request.samples) != request.submit.num_samples:
        samples = numbered(request.submit.num_samples, "sample")
        raise WireError(f"a request has {samples}, but {len(request.samples)} in the record")


SAMPLE_END = Codec(journal_pb2.JournalEnd, SampleEnd, names={"at": "ended_at"}, parts=(END,), other=("number",))
SAMPLE = Codec(journal_pb2.JournalSample, SavedSample, parts=(SAMPLE_END, SPAN))
QUARANTINED = Codec(
    journal_pb2.JournalQuarantined, QuarantineEntry, given=("age_seconds", "expires_seconds"), other=("convicted_at",)
)
REQUEST = Codec(
    journal_pb2.JournalRequest,
    SavedRequest,
    made={
        "submit": lambda request: SUBMIT.decode(request.submit, frontend=""),
        # Without samples in the record nothing is known of them.
        "samples": lambda request: (
            tuple(map(SAMPLE.decode, request.samples)) or (SavedSample(),) * request.submit.num_samples
        ),
    },
    sent={"submit": _submit, "samples": _samples},
    check=_check_samples,
)


def record(**one: Any) -> bytes:
    """Encodes a JournalRecord that has this message, by its name there."""
    return journal_pb2.JournalRecord(**one).SerializeToString()
