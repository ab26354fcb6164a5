"""litellm: completion, stream and errors. Arguments: the gateway's URL, the model's folder (unused)."""

import os
import sys
from importlib.metadata import version

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

ASK = {"model": "openai/bundled", "api_base": f"{sys.argv[1]}/v1", "api_key": "k", "seed": 3, "temperature": 0.5}
MESSAGES = [{"role": "user", "content": "hello"}]
litellm.telemetry = False

whole = litellm.completion(messages=MESSAGES, max_tokens=20, **ASK)
assert whole.usage.completion_tokens == 20 and whole.choices[0].finish_reason == "length"
pieces = litellm.completion(messages=MESSAGES, max_tokens=20, stream=True, **ASK)
text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
assert text == whole.choices[0].message.content, (text, whole.choices[0].message.content)
plain = litellm.text_completion(prompt="Return the", max_tokens=5, **{**ASK, "model": "text-completion-openai/bundled"})
assert plain.usage.completion_tokens == 5
try:
    litellm.completion(messages=MESSAGES, **{**ASK, "model": "openai/nothing"})
except litellm.NotFoundError as error:
    refused = error.status_code
assert refused == 404
try:
    litellm.completion(messages=[{"role": "user", "content": "x" * 100_000}], **ASK)
except litellm.ContextWindowExceededError as error:
    refused = error.status_code
assert refused == 400
print(f"litellm {version('litellm')}: a completion, an equal stream, a text completion, 2 classes of errors")
