"""Owns the list of methods that the gRPC server serves: the servicer of each, and the check that admits its calls.

Knows nothing of what the methods do.
"""

from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf import message_factory
from grpc_health.v1 import health_pb2
from tandem.v1 import control_pb2, inference_pb2

from scheduler_svc.frontend.control import ControlServicer
from scheduler_svc.frontend.health import HealthServicer
from scheduler_svc.frontend.rpc.calls import Calls, Method
from scheduler_svc.frontend.rpc.parsing import MAX_SMALL_BYTES
from scheduler_svc.frontend.servicer import InferenceServicer

INFERENCE: Any = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
CONTROL: Any = control_pb2.DESCRIPTOR.services_by_name["ControlService"]
HEALTH: Any = health_pb2.DESCRIPTOR.services_by_name["Health"]
# Health calls that are served while callers of other methods have used up the shared bounds.
HEALTH_RESERVE = 256


def add_to_server(
    server: grpc.aio.Server,
    calls: Calls,
    inference: InferenceServicer,
    control: ControlServicer,
    health: HealthServicer,
) -> None:
    """Adds every method of the three services to `server`. `calls` handles each call."""
    # The other methods admit every call of up to MAX_SMALL_BYTES.
    admit: dict[str, Callable[[], int]] = {
        "Generate": inference.admit_generate,
        "Resume": inference.admit_resume,
        "Tokenize": inference.admit_tokenize,
        "Detokenize": inference.admit_detokenize,
        "Watch": health.admit_watch,
    }
    for service, servicer in ((INFERENCE, inference), (CONTROL, control), (HEALTH, health)):
        handlers = {
            method.name: calls.handler(
                Method(
                    request=message_factory.GetMessageClass(method.input_type),
                    admit=admit.get(method.name, lambda: MAX_SMALL_BYTES),
                    answer=getattr(servicer, method.name),
                    serialize=message_factory.GetMessageClass(method.output_type).SerializeToString,
                    reserve=HEALTH_RESERVE if service is HEALTH else 0,
                )
            )
            for method in service.methods
        }
        # Not as registered methods: gRPC would wait for the calls of each method separately, which costs 50 us a call.
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))


def add_reflection(server: grpc.aio.Server) -> None:
    """Adds gRPC reflection of the same services."""
    from grpc_reflection.v1alpha import reflection

    names = [service.full_name for service in (INFERENCE, CONTROL, HEALTH)]
    reflection.enable_server_reflection([*names, reflection.SERVICE_NAME], server)
