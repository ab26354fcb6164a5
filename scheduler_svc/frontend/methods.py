"""Owns the list of methods that a gRPC server serves: the servicer of each, and the checks that admit its calls.

Knows nothing of what the methods do.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import grpc
import grpc.aio
from google.protobuf import message_factory
from grpc_health.v1 import health_pb2
from tandem.v1 import control_pb2, inference_pb2

from scheduler_svc.door.tenant import ALL_RIGHTS, Right, Rights
from scheduler_svc.frontend.control import ControlServicer
from scheduler_svc.frontend.entrance import Entrance
from scheduler_svc.frontend.grpc_tuning.call_lines import NUM_ASKED, Lines
from scheduler_svc.frontend.readiness import HealthServicer
from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.rpc.calls import MAX_SMALL_BYTES, CallLog, Calls, Method, Room
from scheduler_svc.frontend.rpc.gate import Bound, Gate
from scheduler_svc.frontend.scan import MIN_BYTES, Scan
from scheduler_svc.frontend.servicer import InferenceServicer
from scheduler_svc.frontend.sizes import MAX_ABORT_BYTES, Sizes

_INFERENCE: Rights = frozenset({Right.INFERENCE})
_CONTROL: Rights = frozenset({Right.CONTROL})

RIGHTS: Mapping[str, Rights] = {
    "/tandem.v1.InferenceService/Generate": _INFERENCE,
    "/tandem.v1.InferenceService/Resume": _INFERENCE,
    "/tandem.v1.InferenceService/Tokenize": _INFERENCE,
    "/tandem.v1.InferenceService/Detokenize": _INFERENCE,
    "/tandem.v1.InferenceService/RenderChat": _INFERENCE,
    # Without the right of control it ends the tenant's own requests only.
    "/tandem.v1.ControlService/Abort": _INFERENCE | _CONTROL,
    # Without the right of control it lists the tenant's own requests only.
    "/tandem.v1.ControlService/ListRequests": _INFERENCE | _CONTROL,
    "/tandem.v1.ControlService/GetModelInfo": _INFERENCE | _CONTROL,
    "/tandem.v1.ControlService/GetCaller": ALL_RIGHTS,
    "/tandem.v1.ControlService/GetLoad": _CONTROL,
    "/tandem.v1.ControlService/FlushCache": _CONTROL,
    "/tandem.v1.ControlService/ListQuarantine": _CONTROL,
    "/tandem.v1.ControlService/ClearQuarantine": _CONTROL,
    "/tandem.v1.ControlService/Drain": _CONTROL,
    "/tandem.v1.ControlService/UpdateWeights": _CONTROL,
    "/grpc.health.v1.Health/Check": ALL_RIGHTS,
    "/grpc.health.v1.Health/List": ALL_RIGHTS,
    "/grpc.health.v1.Health/Watch": ALL_RIGHTS,
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": ALL_RIGHTS,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": ALL_RIGHTS,
}
CLOSED: Rights = frozenset()


def rights_of(method: str) -> Rights:
    """Returns the rights that open the method `/package.Service/Method`; none if it has no entry."""
    return RIGHTS.get(method, CLOSED)


INFERENCE: Any = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
CONTROL: Any = control_pb2.DESCRIPTOR.services_by_name["ControlService"]
HEALTH: Any = health_pb2.DESCRIPTOR.services_by_name["Health"]
ROOMS = {INFERENCE.name: Room.BULK, CONTROL.name: Room.CONTROL, HEALTH.name: Room.HEALTH}
# The methods that stream a completion; each of their calls gets a line in the log.
LOGGED = ("Generate", "Resume")
# gRPC has a line of calls for each of these, so that a probe waits behind no others, and an operator behind no
# requests. It costs the calls of other methods some 3 us for each.
OWN_LINES = ("Generate", "Check", "List", "Watch")
# New requests get the event loop one in PARSE_TURNS turns: each takes about a millisecond without a pause, so if many
# were ready in one turn, the tokens of every running stream would wait for them; and a health check takes ten turns.
# Those that wait hold their messages in memory.
PARSE_TURNS = 9
WAITING = Bound(most=256 << 20, thing="byte of the caller's requests", state="wait to be parsed")
# Calls begin all at once while most are refused, which costs little. Else one begins in each turn while fewer than this
# wait to be parsed, where tenants take turns, so that none waits behind a burst of another.
FEW_WAITING = 256


def add_to_server(
    server: grpc.aio.Server,
    calls: Calls,
    entrance: Entrance,
    inference: InferenceServicer,
    control: ControlServicer,
    health: HealthServicer,
    log: CallLog,
) -> Lines:
    """Adds the three services. `calls` handles each call, `entrance` lets it in, `log` learns of completions.

    Returns the methods that have lines of their own.
    """
    turns = Gate(Bound(most=1), WAITING, num_turns=PARSE_TURNS)

    # The other methods admit every call of up to MAX_SMALL_BYTES.
    admit: dict[str, Callable[[], int]] = {
        "Generate": inference.admit_generate,
        "Resume": inference.admit_resume,
        "Tokenize": inference.admit_tokenize,
        "RenderChat": inference.admit_tokenize,
        "Detokenize": inference.admit_detokenize,
        "Abort": lambda: MAX_ABORT_BYTES,
        "Watch": health.admit_watch,
    }

    let_in = {"Generate": inference.readiness.let_in}

    def sizes() -> Sizes:
        return inference.readiness.sizes

    def most_requests() -> int:
        return NUM_ASKED if inference.readiness.refuses_most else int(turns.num_waiting < FEW_WAITING)

    lines: Lines = {}
    for service, servicer in ((INFERENCE, inference), (CONTROL, control), (HEALTH, health)):
        of_service = turns if service is INFERENCE else None
        handlers = _add_service(server, calls, entrance, service, servicer, admit, let_in, sizes, of_service, log)
        for name, handler in handlers.items():
            lines[f"/{service.full_name}/{name}"] = handler, most_requests if name == "Generate" else lambda: NUM_ASKED
    return lines


def add_health(server: grpc.aio.Server, calls: Calls, health: HealthServicer) -> None:
    """Adds the health service alone, open for everybody."""
    _add_service(server, calls, Entrance(needs_tokens=False), HEALTH, health, {"Watch": health.admit_watch}, {}, Sizes)


def _add_service(
    server: grpc.aio.Server,
    calls: Calls,
    entrance: Entrance,
    service: Any,
    servicer: Any,
    admit: Mapping[str, Callable[[], int]],
    let_in: Mapping[str, Callable[[], None]],
    sizes: Callable[[], Sizes],
    turns: Gate | None = None,
    log: CallLog | None = None,
) -> dict[str, Any]:
    """Returns the handlers of the methods of OWN_LINES."""
    handlers = {
        method.name: calls.handler(
            Method(
                request=message_factory.GetMessageClass(method.input_type),
                enter=functools.partial(entrance.enter, rights_of(f"/{service.full_name}/{method.name}")),
                admit=admit.get(method.name, lambda: MAX_SMALL_BYTES),
                scan=functools.partial(_scan, Scan(method.input_type), sizes),
                answer=getattr(servicer, method.name),
                serialize=message_factory.GetMessageClass(method.output_type).SerializeToString,
                let_in=let_in.get(method.name),
                turns=turns,
                room=ROOMS[service.name],
                name=method.name,
                log=log if method.name in LOGGED else None,
            )
        )
        for method in service.methods
    }
    own = {name: handler for name, handler in handlers.items() if name in OWN_LINES}
    others = {name: handler for name, handler in handlers.items() if name not in own}
    cast(Any, server).add_registered_method_handlers(service.full_name, own)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, others),))
    return own


def _scan(scan: Scan, sizes: Callable[[], Sizes], data: bytes) -> None:
    if len(data) > MIN_BYTES:
        scan.check(data, sizes())


class _Unknown(grpc.GenericRpcHandler):
    """Answers every method. The server asks the handlers in the order in which they were added."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return self._handler


def add_unknown(server: grpc.aio.Server, calls: Calls) -> None:
    """Refuses the methods that were not added before. gRPC would do so too, at any rate."""

    def refuse(context: Any) -> str:
        raise status.Refusal(grpc.StatusCode.UNIMPLEMENTED, "the service has no such method")

    method = Method(
        request=health_pb2.HealthCheckRequest,
        enter=refuse,
        admit=lambda: 0,
        scan=lambda data: None,
        # It is never called.
        answer=cast(Any, refuse),
        serialize=bytes,
    )
    server.add_generic_rpc_handlers((_Unknown(calls.handler(method)),))


def add_reflection(server: grpc.aio.Server, calls: Calls, entrance: Entrance) -> None:
    """Adds gRPC reflection of the same services."""
    # Without reflection it is not needed.
    from scheduler_svc.frontend import reflection

    answer = reflection.answers_for((INFERENCE, CONTROL, HEALTH))
    for name in reflection.NAMES:
        method = Method(
            request=reflection.Request,
            enter=functools.partial(entrance.enter, rights_of(f"/{name}/{reflection.METHOD}")),
            admit=lambda: reflection.MAX_BYTES,
            scan=lambda data: None,
            answer=answer,
            serialize=lambda answer: answer.SerializeToString(),
            room=Room.REFLECTION,
            takes_more=True,
        )
        handlers = {reflection.METHOD: calls.handler(method)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
