"""The endpoints that are one question to the service: models, tokens, health, version."""

import json
import time
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response
from tandem.v1 import control_pb2, inference_pb2

from tandem_client.connection import Metadata
from tandem_client.gateway.errors import HttpError
from tandem_client.gateway.http.exchange import Answer, values
from tandem_client.gateway.openai.bodies import Detokenize, TokenizeChat, TokenizeText
from tandem_client.gateway.openai.fields import read
from tandem_client.gateway.openai.names import CHAT, COMPLETION
from tandem_client.gateway.openai.wanted import chat
from tandem_client.gateway.upstream.service import Service
from tandem_contract.version import version

# A probe of an orchestrator waits for a second or more.
_HEALTH_SECONDS = 1.0
_DETOKENIZE: Mapping[str, str] = {"token_ids": "tokens"}


class Simple:
    """The handlers."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._created = int(time.time())
        self._version = version()

    async def models(self, request: Request, metadata: Metadata) -> Response:
        """GET /v1/models: the served model."""
        info = await self._service.model_info(metadata)
        return _json({"object": "list", "data": [self._described(info)]})

    async def model(self, request: Request, metadata: Metadata) -> Response:
        """GET /v1/models/{id}."""
        name, info = request.path_params["name"], await self._service.model_info(metadata)
        if name != info.model:
            message = f"model {name[:128]!r} is not served here; {info.model!r} is"
            raise HttpError(404, message, param="model", code="model_not_found")
        return _json(self._described(info))

    async def tokenize(self, request: Request, metadata: Metadata) -> Response:
        """POST /tokenize: a text or a conversation to token ids, as vLLM does."""
        given = values(request)
        if given.get("messages") is None:
            body = read(TokenizeText, given)
            asked = inference_pb2.TokenizeRequest(
                model=body.model or "", text=body.prompt, add_special_tokens=body.add_special_tokens
            )
            ids = await self._service.tokenize(asked, metadata, COMPLETION)
        else:
            body = read(TokenizeChat, given)
            ids = await self._service.render(body.model or "", chat(body), metadata, CHAT)
        info, texts = await self._service.model_info(metadata), None
        if body.return_token_strs:
            asked = inference_pb2.DetokenizeRequest(token_ids=ids, skip_special_tokens=False, separately=True)
            texts = list((await self._service.detokenize(asked, metadata)).texts)
        return _json({"count": len(ids), "max_model_len": info.max_length, "tokens": ids, "token_strs": texts})

    async def detokenize(self, request: Request, metadata: Metadata) -> Response:
        """POST /detokenize: token ids to text, as vLLM does."""
        body = read(Detokenize, values(request))
        asked = inference_pb2.DetokenizeRequest(
            model=body.model or "", token_ids=body.token_ids, skip_special_tokens=False
        )
        return _json({"prompt": (await self._service.detokenize(asked, metadata, _DETOKENIZE)).text})

    async def health(self, request: Request, metadata: Metadata) -> Response:
        """GET /health: 200 only while a request that arrives is computed; else 503, a word for the reason, since when.

        Everyone may ask, so it has no sentence of the service.
        """
        try:
            why = await self._service.why_not_serving(metadata, _HEALTH_SECONDS)
        except HttpError as error:
            raise HttpError(503, error.message, kind=error.kind, code=error.code, headers=error.headers) from None
        if why is None:
            return _json({"status": "ok"})
        return _json({"status": "not serving", **why}, 503)

    async def live(self, request: Request, metadata: Metadata) -> Response:
        """GET /livez: whether this process answers."""
        return _json({"status": "ok"})

    async def version(self, request: Request, metadata: Metadata) -> Response:
        """GET /version."""
        return _json({"version": self._version})

    def _described(self, info: control_pb2.GetModelInfoResponse) -> dict[str, object]:
        name, length = info.model, info.max_length
        about = {"created": self._created, "owned_by": "tandem", "root": name, "parent": None, "max_model_len": length}
        return {"id": name, "object": "model", **about}


def _json(value: Mapping[str, object], status: int = 200) -> Response:
    return Answer(json.dumps(value), status)
