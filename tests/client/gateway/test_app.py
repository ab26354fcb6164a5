"""The application by itself: mistakes of its own, and paths that are none."""

import pytest

from tests.client.gateway.asked import MODEL, Ask, Mistaken, Noting, asker

ORIGIN = {"origin": "https://example.org", "access-control-request-method": "POST"}


@pytest.fixture
def ask() -> Ask:
    return asker(Mistaken())


@pytest.mark.parametrize(
    ("method", "path", "endpoint"),
    [("GET", "/health", "health"), ("GET", "/v1/models", "models"), ("POST", "/v1/completions", "completions")],
)
def test_a_mistake_is_answered_and_logged_and_its_words_go_to_the_log_alone(
    ask: Ask, caplog: pytest.LogCaptureFixture, method: str, path: str, endpoint: str
) -> None:
    answer = ask(method, path, json={"prompt": "a"} if method == "POST" else None)
    assert answer.status_code == 500 and "private" not in answer.text
    assert answer.json()["error"] == {
        "message": "an error of the gateway; its log has more", "type": "server_error", "param": None, "code": None,
    }  # fmt: skip
    assert f"an error of the gateway at {endpoint}" in caplog.text and "something private" in caplog.text
    page = ask("GET", "/metrics").text
    assert f'requests_total{{endpoint="{endpoint}",status="500"}} 1' in page
    assert "tandem_gateway_requests_in_work 1\n" in page


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/health/", 404), ("GET", "/v1", 404), ("GET", "/docs", 404),
        ("GET", "http://a//health", 404),
        ("POST", "/livez", 405), ("OPTIONS", "/v1/completions", 405), ("DELETE", "/v1/models", 405),
    ],
)  # fmt: skip
def test_what_is_no_path_is_refused_and_no_page_of_another_site_is_let_in(
    ask: Ask, method: str, path: str, status: int
) -> None:
    answer = ask(method, path, headers=ORIGIN)
    assert answer.status_code == status and answer.json()["error"]["type"] == "invalid_request_error"
    assert ("allow" in answer.headers) == (status == 405)
    assert not [name for name in answer.headers if name.startswith("access-control")]


SERVED = {
    "POST /v1/chat/completions", "POST /v1/completions", "GET /v1/models", "GET /v1/models/{name}", "POST /tokenize",
    "POST /detokenize", "GET /", "GET /health", "GET /livez", "GET /metrics", "GET /version", "GET /openapi.json",
}  # fmt: skip
BASE = "the base URL of a client must end in /v1 and have nothing behind it, like http://a/v1"
CHATS = "POST /v1/chat/completions takes conversations and tools"
TEXTS = "POST /v1/completions takes a text"
TEXT_ALONE = "the service takes and generates text, no sound, images or films"
NO_SCORES = "the service generates text, no embeddings, classes or scores"
NOT_STORED = "nothing is stored; POST /v1/chat/completions and POST /v1/completions answer at once"
MODELS = "GET /v1/models says which model is served"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v1/responses", CHATS), ("/v1/responses/resp_1", CHATS), ("/v1/messages", CHATS), ("/responses", CHATS),
        ("/v1/messages/count_tokens", CHATS), ("/api/chat", CHATS), ("/v1/threads/t1/runs", CHATS),
        ("/api/generate", TEXTS), ("/generate", TEXTS), ("/completion", TEXTS),
        ("/v1/embeddings", NO_SCORES), ("/embeddings", NO_SCORES), ("/v1/rerank", NO_SCORES), ("/v2/rerank", NO_SCORES),
        ("/v1/moderations", NO_SCORES), ("/pooling", NO_SCORES), ("/api/embed", NO_SCORES),
        ("/v1/audio/speech", TEXT_ALONE), ("/v1/audio/transcriptions", TEXT_ALONE), ("/v1/videos", TEXT_ALONE),
        ("/v1/images/generations", TEXT_ALONE),
        ("/v1/files", NOT_STORED), ("/v1/batches/b1", NOT_STORED), ("/v1/chat/completions/c1/messages", NOT_STORED),
        ("/api/tags", MODELS), ("/props", MODELS),
        ("/api/pull", "the model is chosen when the service starts"),
        ("/healthz", "GET /health says whether a request would be computed"),
        ("/docs", "GET /openapi.json describes the paths"),
        ("/chat/completions", BASE), ("/completions", BASE), ("/models", BASE), ("/models/toy", BASE),
        ("/v1/v1/chat/completions", BASE), ("/v1/chat/completions/chat/completions", BASE),
        ("/openai/deployments/toy/chat/completions", BASE), ("/api/v1/models", BASE),
        ("/v1/chat/completions/", "did you mean /v1/chat/completions?"),
        ("/V1/Completions", "did you mean /v1/completions?"), ("/health/", "did you mean /health?"),
        ("http://a//v1//models", "did you mean /v1/models?"), ("http://a//", "did you mean /?"),
        ("/v1/chat/completion", "did you mean /v1/chat/completions?"), ("/v1/tokenize", "did you mean /tokenize?"),
        ("/nothing", "GET / lists the paths"), ("/v1", "GET / lists the paths"), ("/v1/", "GET / lists the paths"),
        ("/" + "x" * 3000, "GET / lists the paths"),
    ],
)  # fmt: skip
def test_what_there_is_in_the_place_of_a_path(ask: Ask, path: str, said: str) -> None:
    error = ask("GET", path).json()["error"]
    assert error["message"] == f"there is no {path.removeprefix('http://a')[:200]}; {said}"
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "not_found")


def test_the_root_lists_the_paths_and_each_is_served(ask: Ask) -> None:
    answer = ask("GET", "/").json()
    assert answer["version"] == ask("GET", "/version").json()["version"]
    assert set(answer["paths"]) == SERVED and all(answer["paths"].values())
    for method, path in map(str.split, SERVED):
        other = "POST" if method == "GET" else "GET"
        refused = ask(other, path)
        assert refused.status_code == 405 and method in refused.headers["allow"].split(", ")
        assert refused.json()["error"]["message"] == f"{other} is not a method of {path}; it takes {method}"


def test_a_slash_behind_the_models_is_their_list_and_a_name_may_have_slashes() -> None:
    ask = asker(Noting())
    [model] = ask("GET", "/v1/models").json()["data"]
    assert model["id"] == MODEL
    assert ask("GET", "/v1/models/").json()["data"] == [model]
    assert ask("GET", f"/v1/models/{MODEL}").json() == model
    assert ask("GET", "/v1/models/toy").json()["error"]["message"] == f"model 'toy' is not served here; {MODEL!r} is"


@pytest.mark.parametrize("host", ["[", "a/b", "", "\xff", "a b", "<script>", "a" * 300])
def test_a_host_that_is_none_changes_no_refusal(ask: Ask, host: str) -> None:
    for path, said in (("/nothing", "GET / lists the paths"), ("/models", BASE.replace("//a/", "//HOST:PORT/"))):
        answer = ask("GET", path, headers={"host": host.encode("latin-1")})
        assert answer.status_code == 404 and answer.json()["error"]["message"] == f"there is no {path}; {said}"
