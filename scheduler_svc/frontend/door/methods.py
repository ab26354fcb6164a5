"""Owns which rights open each method. A caller needs one of them. A method without an entry is closed."""

from collections.abc import Mapping

from scheduler_svc.door.tenant import ALL_RIGHTS, Right, Rights

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
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": ALL_RIGHTS,
}
CLOSED: Rights = frozenset()


def rights_of(method: str) -> Rights:
    """Returns the rights that open the method `/package.Service/Method`; none if it has no entry."""
    return RIGHTS.get(method, CLOSED)
