"""The answer for a path that is not served: what there is instead, or how its client was set up wrongly.

Owns the paths of other servers and of the rest of OpenAI's API. Pure, and gets the paths that are served.
"""

import difflib
import re
from collections.abc import Iterable, Mapping

_BASE = "/v1"
# A name or address, and a port.
_HOST = re.compile(r"[\w.-]{1,253}(:\d{1,5})?|\[[\da-fA-F:.]{2,45}\](:\d{1,5})?", re.ASCII)
# Longer ones are not taken for slips of one that is served.
_MAX_CHARS = 100

# What is said, and the paths for which it is said, with all below them; those that begin with /v1 without that.
_INSTEAD: Mapping[str, Iterable[str]] = {
    "POST /v1/chat/completions takes conversations and tools": (
        "/api/chat", "/assistants", "/conversations", "/messages", "/realtime", "/responses", "/threads",
    ),
    "POST /v1/completions takes a text": (
        "/api/generate", "/completion", "/edits", "/generate", "/generate_stream", "/infill",
    ),
    "GET /v1/models says which model is served": (
        "/api/ps", "/api/show", "/api/tags", "/get_model_info", "/info", "/model_info", "/props",
    ),
    "the model is chosen when the service starts": (
        "/api/copy", "/api/create", "/api/delete", "/api/pull", "/api/push", "/fine_tuning", "/load_lora_adapter",
        "/unload_lora_adapter",
    ),
    "the service generates text, no embeddings, classes or scores": (
        "/api/embed", "/api/embeddings", "/classify", "/embed", "/embedding", "/embeddings", "/moderations", "/pooling",
        "/rerank", "/score",
    ),
    "the service takes and generates text, no sound, images or films": ("/audio", "/images", "/videos"),
    "nothing is stored; POST /v1/chat/completions and POST /v1/completions answer at once": (
        "/batches", "/chat/completions", "/completions", "/containers", "/evals", "/files", "/uploads",
        "/vector_stores",
    ),
    "POST /tokenize and POST /detokenize convert text and token ids": ("/extras/tokenize", "/tokens"),
    "GET /health says whether a request would be computed": (
        "/health_generate", "/healthz", "/ping", "/ready", "/readyz",
    ),
    "GET /version has the version": ("/api/version", "/server_info"),
    "GET /openapi.json describes the paths": ("/docs", "/openapi.yaml", "/redoc", "/swagger"),
}  # fmt: skip
_SAID: Mapping[str, str] = {path: said for said, paths in _INSTEAD.items() for path in paths}


def missing(path: str, served: Iterable[str], host: str) -> str:
    """Returns what is said of a path that is not served. `served`: the paths that are; `host`: where it was asked."""
    whole = [path_served for path_served in served if "{" not in path_served]
    return f"there is no {path}; {_instead(path, whole, host)}"


def _instead(path: str, served: list[str], host: str) -> str:
    bare = re.sub("/+", "/", path).rstrip("/").lower() or "/"
    if bare in served:
        return f"did you mean {bare}?"
    ends = tuple(full.removeprefix(_BASE) for full in served if full.startswith(f"{_BASE}/"))
    if bare.endswith(ends) or bare.startswith("/models/"):
        place = host if _HOST.fullmatch(host) else "HOST:PORT"
        return f"the base URL of a client must end in {_BASE} and have nothing behind it, like http://{place}{_BASE}"
    # Some APIs have a version of their own.
    above = re.sub(r"\A/v\d(?=/)", "", bare)
    while above.strip("/"):
        if (said := _SAID.get(above)) is not None:
            return said
        above = above.rpartition("/")[0]
    near = difflib.get_close_matches(bare, served, n=1) if len(bare) <= _MAX_CHARS else ()
    return f"did you mean {near[0]}?" if near else "GET / lists the paths"
