"""What the demo asks. The bundled model has read Python's documentation, so the prompts begin like it."""

from dataclasses import dataclass

from client.request import GenerateOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt and how to draw the tokens after it."""

    prompt: str
    options: GenerateOptions


_GREEDY: GenerateOptions = {"temperature": 0.0}
# The noise is keyed by seed and position, so this one too must come out the same each time.
_SEEDED: GenerateOptions = {"temperature": 0.8, "top_p": 0.95, "seed": 2026}


def questions(max_new_tokens: int) -> list[Question]:
    """The demo's requests, each with so many tokens."""
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
    # A fixed length shows the same work in every run.
    fixed: GenerateOptions = {"max_new_tokens": max_new_tokens, "ignore_eos": True}
    return [Question(prompt=prompt, options={**options, **fixed}) for prompt, options in prompts]
