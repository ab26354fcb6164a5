"""The endpoints that are one question to the service: models, tokens, health, version."""

import json
import time
from collections.abc import Mapping

from tandem.v1 import chat_pb2, control_pb2, inference_pb2

from tandem_client.credentials import Metadata
from tandem_client.gateway.errors import HttpError, invalid
from tandem_client.gateway.http.exchange import Exchange
from tandem_client.gateway.openai.chats import set_chat
from tandem_client.gateway.openai.fields import Fields, text_of
from tandem_client.gateway.openai.names import CHAT, COMPLETION
from tandem_client.gateway.openai.options import token_ids
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

    async def models(self, exchange: Exchange, metadata: Metadata) -> None:
        """GET /v1/models: the served model."""
        info = await self._service.model_info(metadata)
        await _json(exchange, {"object": "list", "data": [self._described(info)]})

    async def model(self, exchange: Exchange, metadata: Metadata) -> None:
        """GET /v1/models/{id}."""
        name, info = exchange.path.removeprefix("/v1/models/"), await self._service.model_info(metadata)
        if name != info.model:
            message = f"model {name[:128]!r} is not served here; {info.model!r} is"
            raise HttpError(404, message, param="model", code="model_not_found")
        await _json(exchange, self._described(info))

    async def tokenize(self, exchange: Exchange, metadata: Metadata, values: dict[str, object]) -> None:
        """POST /tokenize: a text or a conversation to token ids, as vLLM does."""
        fields = Fields(values)
        model, with_texts = fields.text("model") or "", fields.flag("return_token_strs") or False
        if fields.any("messages") is None:
            adds, text = fields.flag("add_special_tokens"), fields.any("prompt")
            if text is None:
                raise invalid("prompt", "prompt is missing; give prompt or messages")
            fields.end()
            asked = inference_pb2.TokenizeRequest(model=model, text=text_of(text, "prompt"), add_special_tokens=adds)
            ids = await self._service.tokenize(asked, metadata, COMPLETION)
        else:
            fields.same_as_unset({"add_special_tokens": (False,), "chat_template": ()})
            chat = chat_pb2.Chat()
            set_chat(fields, chat)
            fields.end()
            ids = list((await self._service.render(model, chat, metadata, CHAT)).token_ids)
        info, texts = await self._service.model_info(metadata), None
        if with_texts:
            asked = inference_pb2.DetokenizeRequest(token_ids=ids, skip_special_tokens=False, separately=True)
            texts = list((await self._service.detokenize(asked, metadata)).texts)
        await _json(
            exchange, {"count": len(ids), "max_model_len": info.max_length, "tokens": ids, "token_strs": texts}
        )  # fmt: skip

    async def detokenize(self, exchange: Exchange, metadata: Metadata, values: dict[str, object]) -> None:
        """POST /detokenize: token ids to text, as vLLM does."""
        fields = Fields(values)
        model, items = fields.text("model") or "", fields.items("tokens")
        if items is None:
            raise fields.required("tokens")
        fields.end()
        asked = inference_pb2.DetokenizeRequest(
            model=model, token_ids=token_ids(items, "tokens"), skip_special_tokens=False
        )  # fmt: skip
        await _json(exchange, {"prompt": (await self._service.detokenize(asked, metadata, _DETOKENIZE)).text})

    async def health(self, exchange: Exchange, metadata: Metadata) -> None:
        """GET /health: 200 only while a request that arrives is computed; else 503, a word for the reason, since when.

        Everyone may ask, so it has no sentence of the service.
        """
        try:
            why = await self._service.why_not_serving(metadata, _HEALTH_SECONDS)
        except HttpError as error:
            raise HttpError(503, error.message, kind=error.kind, code=error.code, headers=error.headers) from None
        if why is None:
            await _json(exchange, {"status": "ok"})
        else:
            await _json(exchange, {"status": "not serving", **why}, 503)

    async def live(self, exchange: Exchange, metadata: Metadata) -> None:
        """GET /livez: whether this process answers."""
        await _json(exchange, {"status": "ok"})

    async def version(self, exchange: Exchange, metadata: Metadata) -> None:
        """GET /version."""
        await _json(exchange, {"version": self._version})

    def _described(self, info: control_pb2.GetModelInfoResponse) -> dict[str, object]:
        return {
            "id": info.model,
            "object": "model",
            "created": self._created,
            "owned_by": "tandem",
            "root": info.model,
            "parent": None,
            "max_model_len": info.max_length,
        }


async def _json(exchange: Exchange, value: Mapping[str, object], status: int = 200) -> None:
    await exchange.answer(status, json.dumps(value).encode())
