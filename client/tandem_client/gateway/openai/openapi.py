"""The description of the HTTP API, `/openapi.json`: paths from the routes, bodies from their models."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.routing import BaseRoute, Route

from tandem_client.gateway.openai.bodies import Chat, Completion, Detokenize, TokenizeChat, TokenizeText
from tandem_contract.version import version

_BODIES: Mapping[str, tuple[type[BaseModel], ...]] = {
    "/v1/completions": (Completion,),
    "/v1/chat/completions": (Chat,),
    "/tokenize": (TokenizeText, TokenizeChat),
    "/detokenize": (Detokenize,),
}
_REF = "#/components/schemas/{model}"
_WORD = {"type": ["string", "null"]}
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {"message": {"type": "string"}, "type": {"type": "string"}, "param": _WORD, "code": _WORD},
        }
    },
}


def description(routes: Iterable[BaseRoute], about: Mapping[str, str]) -> str:
    """Returns the description as OpenAPI 3.1 in JSON. `about`: of each path, what it has."""
    models = [(body, "validation") for bodies in _BODIES.values() for body in bodies]
    _, schemas = models_json_schema(models, ref_template=_REF)  # pyright: ignore[reportArgumentType]
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Tandem", "version": version()},
        "paths": {route.path_format: _path(route, about[route.path]) for route in routes if isinstance(route, Route)},
        "components": {
            "schemas": {**schemas["$defs"], "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        # Only a service with a token file asks for keys.
        "security": [{"key": []}, {}],
    }
    return json.dumps(document)


def _path(route: Route, about: str) -> dict[str, Any]:
    method = "post" if "POST" in (route.methods or ()) else "get"
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": about,
        "responses": {"200": {"description": "The answer."}, "default": _content("An error.", _ref("Error"))},
    }
    if bodies := _BODIES.get(route.path):
        schema = {"anyOf": [_ref(body.__name__) for body in bodies]}
        operation["requestBody"] = {**_content(f"What {route.path} takes.", schema), "required": True}
    operation["parameters"] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in route.param_convertors
    ]
    return {method: operation}


def _ref(model: str) -> dict[str, str]:
    return {"$ref": _REF.format(model=model)}


def _content(words: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"description": words, "content": {"application/json": {"schema": schema}}}
