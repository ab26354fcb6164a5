"""Frames and records are byte for byte what was written by hand, so that older peers and schedulers read them."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from hashlib import sha256
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.resources import CONSTRAINT, Resource
from scheduler_svc.journal import records
from scheduler_svc.wire import frontend, worker
from tandem_contract.codec import unaliased


def sample(hint: Any, number: int = 1) -> Any:
    """A value of this type, with other contents for another number; no field has its default."""
    hint = unaliased(hint)
    origin, arguments = get_origin(hint), get_args(hint)
    if NoneType in arguments:
        return sample(next(one for one in arguments if one is not NoneType), number)
    if is_dataclass(hint) and isinstance(hint, type):
        hints = get_type_hints(hint)
        return hint(**{each.name: sample(hints[each.name], number + i) for i, each in enumerate(fields(hint), 1)})
    if origin is np.ndarray:
        return np.arange(number, number + 3).astype(get_args(arguments[1])[0])
    if origin in (tuple, frozenset):
        inner = arguments if Ellipsis not in arguments and origin is tuple else arguments[:1] * 2
        return origin(sample(one, number + i) for i, one in enumerate(inner))
    if issubclass(hint, Enum):
        return list(hint)[number % len(hint)]
    made: Mapping[type, Any] = {bool: True, int: number, float: number / 4, str: f"text {number}"}
    return made.get(hint, sha256(b"%d" % number).digest())


def end(number: int, *, fails: bool = False) -> fx.End:
    whole = sample(fx.End, number)
    by_token = replace(whole, reason=fx.EndReason.STOP_TOKEN, failure=None)
    return replace(whole, reason=None, stop_token_id=None) if fails else by_token


def effects() -> dict[str, Any]:
    """One of each class of effects that front ends and workers get, without plans."""
    found = {kind.__name__: sample(kind) for kind in get_args(fx.Effect)}
    others = "ModelServed SendPlan StepReport Note News KillWorker WeightsChanged Detached Forgotten"
    for one in others.split():
        del found[one]
    found["StepOutput"] = replace(
        found["StepOutput"], ends=(end(3), end(9, fails=True)), logprobs=None, prompt_logprobs=()
    )
    # Fields that came later are at their defaults.
    found["CoreStatus"] = replace(found["CoreStatus"], places=0)
    found["Resumed"] = replace(found["Resumed"], ends=(end(5), None))
    found["WorkerAccepted"] = replace(found["WorkerAccepted"], page_root="ab" * 16)
    return found


def submit() -> ev.Submit:
    resources = (Resource(CONSTRAINT, sha256(b"g").digest(), b"g"),)
    hints = {name: hint for name, hint in get_type_hints(ev.Submit).items() if name != "resources"}
    values = {name: sample(hint, i) for i, (name, hint) in enumerate(hints.items(), 1)}
    return ev.Submit(
        **values | {"num_samples": 2, "resources": resources, "request_id": "tenant/r", "tenant": "tenant"}
    )


# SHA-256, made when each message was still translated by hand.
BY_HAND: dict[str, str] = {
    "Admitted": "da1973705da7252d",
    "Rejected": "41a64eb5f6790266",
    "StepOutput": "098754d1beea04f3",
    "Waits": "a16c1a8cf3322eac",
    "AbortReply": "b82d2f1d4061499e",
    "LoadReply": "dab2fcbccf6da0bc",
    "FlushReply": "ce1f229a6ce17eb9",
    "QuarantineReply": "cf57e1f6d4a83a4c",
    "RequestsReply": "4ec5d112d68c2549",
    "CoreStatus": "4920af20e07cb246",
    "WorkerAccepted": "135f1e52068c5b8f",
    "WorkerProven": "17d5f5a33ab5f6ae",
    "WorkerRefused": "892835c7e0e51170",
    "AskRejoin": "fdbb66f97af044e4",
    "DismissWorker": "913da1f8df6f8fd4",
    "PrepareResource": "6a66f32612129ef8",
    "DropResource": "c49d5dfd7b3aceaf",
    "LoadWeights": "810a247c095952f1",
    "WeightsReport": "4d28175e6f94429a",
    "UpdateRefused": "a00cc4ac286f6161",
    "AnnounceDrain": "7648eb81c4e9fef7",
    "DrainReport": "f3946aefa2d15791",
    "DrainRefused": "eb85c839407fd99c",
    "Resumed": "af8e2d11d01da089",
    "Replaced": "485d06e5d978d320",
    "request": "b8bb2c400ac0bc29",
    "whole request": "f56208746a4031b6",
    "end": "477319fdc809f071",
}


def digest(data: bytes) -> str:
    return sha256(data).hexdigest()[:16]


@pytest.mark.parametrize("name", BY_HAND)
def test_what_is_sent_and_written_has_the_bytes_of_before(name: str) -> None:
    if name in (made := effects()):
        effect = made[name]
        is_for_workers = hasattr(effect, "worker") and not hasattr(effect, "frontend")
        data = worker.frame_of(effect) if is_for_workers else frontend.frame_of(effect)
    else:
        request = records.SavedRequest(number=7, accepted_at=1.5, submit=submit())
        ended = records.SampleEnd(end=end(4), at=2.5)
        tokens, span = np.arange(3, dtype=np.int32), fx.WeightsSpan(from_token=1, version="v")
        one = records.SavedSample(tokens=tokens, end=ended, weights=(span,))
        whole = replace(request, samples=(one, records.SavedSample(tokens=tokens)))
        data = {
            "request": lambda: records.record(request=records.REQUEST.encode(request)),
            "whole request": lambda: records.record(request=records.REQUEST.encode(whole)),
            "end": lambda: records.record(end=records.end_arguments(8, ended)),
        }[name]()
    assert digest(data) == BY_HAND[name]
