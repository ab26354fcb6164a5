"""Owns what gRPC reflection shows: the public services, their messages and the details of errors, nothing internal.

Knows nothing of calls. A caller sends several requests in one call; `rpc/calls.py` reads each as that of any other
call. The answers are made by gRPC's own package. Callers ask under the name of v1alpha or of v1, which differ in
nothing else.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, cast

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.rpc import error_details_pb2  # pyright: ignore[reportMissingTypeStubs]
from grpc_reflection.v1alpha import reflection, reflection_pb2

Request = reflection_pb2.ServerReflectionRequest
NAMES = (reflection.SERVICE_NAME, "grpc.reflection.v1.ServerReflection")
METHOD = "ServerReflectionInfo"
# A request is a name. Up to this many bytes are parsed without a look at them.
MAX_BYTES = 4096


def answers_for(services: Sequence[Any]) -> Callable[[Request, Any], Awaitable[Any]]:
    """Returns a function that answers a request about these services or reflection; an unknown name is answered too."""
    pool, added = DescriptorPool(), set[str]()
    for file in (*(service.file for service in services), reflection_pb2.DESCRIPTOR, error_details_pb2.DESCRIPTOR):
        _add(pool, cast(FileDescriptor, file), added)
    names = [*(service.full_name for service in services), reflection.SERVICE_NAME]
    servicer: Any = cast(Any, reflection).aio.ReflectionServicer(names, pool)

    async def answer(request: Request, context: Any) -> Any:
        async with aclosing(servicer.ServerReflectionInfo(_once(request), context)) as answers:
            return await anext(answers)

    return answer


def _add(pool: DescriptorPool, file: FileDescriptor, names: set[str]) -> None:
    if file.name in names:
        return
    names.add(file.name)
    for needed in file.dependencies:
        _add(pool, needed, names)
    pool.AddSerializedFile(file.serialized_pb)


async def _once(request: Request) -> AsyncIterator[Request]:
    yield request
