"""The demo's prompts. The bundled model was trained on Python's documentation, so the prompts begin like it."""

from dataclasses import dataclass

from tandem_client.wire.request import GenerateOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt and its sampling options."""

    prompt: str
    options: GenerateOptions


_GREEDY: GenerateOptions = {"temperature": 0.0}
# The noise depends on seed and position only, so this completion too must be the same each time.
_SEEDED: GenerateOptions = {"temperature": 0.8, "top_p": 0.95, "seed": 2026}


def questions(max_new_tokens: int) -> list[Question]:
    """Returns the demo's requests, each for `max_new_tokens` tokens."""
    prompts = [
        ("Return the number of", _GREEDY),
        ("Raise ValueError if the", _GREEDY),
        ("This module provides a simple interface to", _GREEDY),
        ("If the file does not exist,", _GREEDY),
        ("Convert a string to a", _GREEDY),
        ("Read up to size bytes from the", _GREEDY),
        ("The default value is None, which means", _GREEDY),
        ("This class is used to", _SEEDED),
    ]
    # With a fixed length, every run does the same work.
    fixed: GenerateOptions = {"max_new_tokens": max_new_tokens, "ignore_eos": True}
    return [Question(prompt=prompt, options={**options, **fixed}) for prompt, options in prompts]
