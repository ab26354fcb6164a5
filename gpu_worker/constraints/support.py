"""Whether a worker takes constraints: a tokenizer, and llguidance. Imports neither."""

from importlib.util import find_spec


def refusal(tokenizer_json: bytes) -> str:
    """Why the worker takes no constraints, in one sentence; empty if it takes them."""
    if not tokenizer_json:
        return "the model has no tokenizer, and constraints are about texts"
    if find_spec("llguidance") is None:
        return "llguidance is not installed beside the worker, and masks of constraints need it"
    return ""
