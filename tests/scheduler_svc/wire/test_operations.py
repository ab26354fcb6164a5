"""Drain and UpdateWeights on the wire, under one table: the requests of operators, and the answers to them."""

from dataclasses import fields
from typing import Any

import pytest
from tandem.internal.v1 import frontend_pb2 as pb
from tandem.v1 import control_pb2

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.operators import Running, UpdateWeights, Weights
from scheduler_svc.core.messages.reports import DrainReport, DrainState, UpdateState, WeightsReport
from scheduler_svc.wire.frontend import event_of, frame_of
from tandem_contract.bounds import WireError

WHOSE: dict[str, Any] = {"frontend": "f", "query": 7}


def asked(name: str, request: Any = None, *, stop_replies: bool = False) -> Any:
    message = pb.FrontendToCore()
    inside = getattr(message, name)
    inside.query, inside.stop_replies = 7, stop_replies
    if request is not None:
        inside.request.CopyFrom(request)
    return event_of(pb.FrontendToCore.FromString(message.SerializeToString()), "f")


def update(**changes: Any) -> Any:
    return control_pb2.UpdateWeightsRequest(**{"version": "v", "folder": "/f"} | changes)


WEIGHTS = Weights(version="v", folder="/f")


@pytest.mark.parametrize(
    ("name", "request_", "event"),
    [
        ("drain", control_pb2.DrainRequest(), ev.Drain(worker="", max_seconds=0.0, **WHOSE)),
        (
            "drain",
            control_pb2.DrainRequest(worker="w" * 300, max_seconds=2.5, force=True),
            ev.Drain(worker="w" * 256, max_seconds=2.5, force=True, **WHOSE),
        ),
        ("update_weights", update(), UpdateWeights(weights=WEIGHTS, running=Running.RECOMPUTE, **WHOSE)),
        (
            "update_weights",
            update(running=control_pb2.RUNNING_REQUESTS_ABORT, in_turn=True, max_seconds=2.5),
            UpdateWeights(weights=WEIGHTS, running=Running.ABORT, in_turn=True, max_seconds=2.5, **WHOSE),
        ),
    ],
)
def test_what_an_operator_asks_for_is_an_event(name: str, request_: Any, event: Any) -> None:
    assert asked(name, request_) == event


@pytest.mark.parametrize("name", ["drain", "update_weights"])
def test_an_operator_who_leaves_names_the_query_alone(name: str) -> None:
    event = asked(name, stop_replies=True)
    assert (event.frontend, event.query, event.stop_replies) == ("f", 7, True)


@pytest.mark.parametrize("seconds", [-0.5, 86_400.5, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["drain", "update_weights"])
def test_a_time_out_of_bounds_is_no_event(name: str, seconds: float) -> None:
    request = update(max_seconds=seconds) if name == "update_weights" else control_pb2.DrainRequest(max_seconds=seconds)
    with pytest.raises(WireError, match=r"max_seconds is .*; it must be 0 to 86400"):
        asked(name, request)


@pytest.mark.parametrize("changes", [{"version": ""}, {"folder": ""}, {"version": "v" * 129}, {"running": 9}])
def test_an_update_out_of_bounds_is_no_event(changes: dict[str, Any]) -> None:
    with pytest.raises(WireError, match=f"{next(iter(changes))} "):
        asked("update_weights", update(**changes))


COMMON: dict[str, Any] = {"running": 3, "waiting": 2, "seconds": 1.5, "detail": "what", **WHOSE}
REPORTS = [
    *(DrainReport(state=each, worker="w", worker_running=1, tokens_left=9, moved=4, **COMMON) for each in DrainState),
    *(WeightsReport(state=each, version="v", workers=2, workers_updated=1, **COMMON) for each in UpdateState),
]


def reply_of(effect: Any) -> Any:
    message = pb.CoreToFrontend.FromString(frame_of(effect))
    return getattr(message, str(message.WhichOneof("message")))


@pytest.mark.parametrize("report", REPORTS, ids=lambda each: f"{type(each).__name__} {each.state}")
def test_a_report_has_each_field_of_its_progress_and_says_whether_it_is_the_last(report: Any) -> None:
    reply = reply_of(report)
    is_drain = isinstance(report, DrainReport)
    assert isinstance(reply, pb.DrainReply if is_drain else pb.UpdateWeightsReply)
    assert (reply.query, reply.refusal, reply.message) == (7, 0, "")
    names = {each.name for each in fields(report)} - {"frontend", "query", "state"}
    assert {name: getattr(reply.progress, name) for name in names} == {name: getattr(report, name) for name in names}
    assert names | {"state"} == set(reply.progress.DESCRIPTOR.fields_by_name)
    states = control_pb2.DrainState if is_drain else control_pb2.UpdateState
    prefix = "DRAIN_STATE_" if is_drain else "UPDATE_STATE_"
    assert states.Name(reply.progress.state) == prefix + report.state.name
    assert reply.is_last == (report.state.value not in ("draining", "leaving", "updating"))


@pytest.mark.parametrize("code", fx.RejectCode)
def test_a_refusal_has_its_code_and_the_field_at_fault(code: fx.RejectCode) -> None:
    said: dict[str, Any] = {"code": code, "message": "why", **WHOSE}
    for refusal, field in (
        (fx.DrainRefused(**said), "worker"),
        (fx.UpdateRefused(**said), ""),
        (fx.UpdateRefused(field="folder", **said), "folder"),
    ):
        reply = reply_of(refusal)
        assert pb.RejectCode.Name(reply.refusal) == f"REJECT_CODE_{code.name}"
        assert (reply.query, reply.message, reply.field) == (7, "why", field)
        assert not reply.HasField("progress")
