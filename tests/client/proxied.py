"""A fake service behind a proxy that names it, as Envoy does with the committed file."""

from typing import Any

import grpc

from tests.client import fake_service
from tests.client.fake_service import FakeService

NAME = "MTI3LjAuMC4xOjUwMDUx"


class Proxied(FakeService):
    """A service behind a proxy, which names it; keeps the services that calls of each kind ask for."""

    def __init__(self) -> None:
        self.asked: dict[str, list[object]] = {"Generate": [], "Resume": [], "Abort": []}
        self.name: str | None = NAME
        super().__init__()
        self.resumption = fake_service.one_completion

    def _pass(self, kind: str, context: grpc.ServicerContext) -> None:
        self.asked[kind].append(dict(context.invocation_metadata()).get("tandem-cell"))
        if self.name is not None:
            context.send_initial_metadata((("tandem-cell", self.name),))

    def Generate(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._pass("Generate", context)
        return super().Generate(request, context)

    def Resume(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._pass("Resume", context)
        return super().Resume(request, context)

    def Abort(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._pass("Abort", context)
        return super().Abort(request, context)
