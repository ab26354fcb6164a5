"""Owns the list of methods that the gRPC server serves: who answers each, and what it takes to be admitted.

Knows nothing of what they do.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf import message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tandem.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc

from scheduler_svc.frontend.control import ControlServicer
from scheduler_svc.frontend.health import HealthServicer
from scheduler_svc.frontend.rpc.calls import Calls, Method
from scheduler_svc.frontend.servicer import InferenceServicer

HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
# Health calls that are served while callers of other methods have used up the shared bounds.
HEALTH_RESERVE = 256
FILES = (inference_pb2.DESCRIPTOR, control_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR)


class _Registrar:
    """Stands where the generated functions expect a server, and keeps what they register."""

    def __init__(self) -> None:
        self.services: dict[str, Mapping[str, Any]] = {}

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Sequence[Any]) -> None:
        """The same handlers once more."""

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Any]) -> None:
        self.services[service_name] = method_handlers


def add_to_server(
    server: grpc.aio.Server,
    calls: Calls,
    inference: InferenceServicer,
    control: ControlServicer,
    health: HealthServicer,
) -> None:
    """Every method of the three services, each call of which `calls` looks after."""
    admit: dict[str, Callable[[], int]] = {
        "Generate": inference.admit_generate,
        "Tokenize": inference.admit_tokenize,
        "Detokenize": inference.admit_detokenize,
        "Watch": health.admit_watch,
        **dict.fromkeys(("Abort", "GetModelInfo", "GetLoad", "FlushCache"), control.admit),
        **dict.fromkeys(("Check", "List"), health.admit),
    }
    registrar: Any = _Registrar()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(inference, registrar)
    control_pb2_grpc.add_ControlServiceServicer_to_server(control, registrar)
    health_pb2_grpc.add_HealthServicer_to_server(health, registrar)
    for service, found in registrar.services.items():
        descriptor = _service(service)
        handlers = {
            name: calls.handler(
                Method(
                    request=message_factory.GetMessageClass(descriptor.methods_by_name[name].input_type),
                    admit=admit[name],
                    answer=handler.unary_stream or handler.unary_unary,
                    serialize=handler.response_serializer,
                    reserve=HEALTH_RESERVE if service == HEALTH else 0,
                )
            )
            for name, handler in found.items()
        }
        # Not registered one by one: then gRPC would wait for each method's calls apart, at 50 us a call.
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))


def add_reflection(server: grpc.aio.Server) -> None:
    """gRPC reflection of the same services."""
    from grpc_reflection.v1alpha import reflection

    names = [file.services_by_name[name].full_name for file in FILES for name in file.services_by_name]
    reflection.enable_server_reflection([*names, reflection.SERVICE_NAME], server)


def _service(full_name: str) -> Any:
    services: list[Any] = [file.services_by_name[name] for file in FILES for name in file.services_by_name]
    return next(service for service in services if service.full_name == full_name)
