"""Owns the limits of a constraint that are checked without compiling it, and the sentences of its refusals.

The limits that bound a message are in the protos.
"""

from tandem.v1 import constraint_pb2, inference_pb2

from tandem_contract.limits import limit_at

CHOICES = limit_at(constraint_pb2.Choices, "choices")
# The longest constraint, and the longest grammar made of it.
MAX_CONSTRAINT_BYTES = limit_at(inference_pb2.GenerateRequest, "constraint").bytes
# The most repetitions of the smallest part of a pattern, after multiplication of nested repetitions.
MAX_REPETITION = 10_000
# The deepest JSON schema, and nesting of groups in a pattern or a grammar.
MAX_DEPTH = 64
# The most alternatives of all rules of a Lark grammar together.
MAX_ALTERNATIVES = 1_024
# What to write instead of a keyword.
_ADVICE = {
    "uniqueItems": "leave it out, and remove what comes twice from the output",
    "not": "say what a value is, not what it is not",
    "contains": "write items",
    "if": "write anyOf",
    "then": "write anyOf",
    "else": "write anyOf",
    "dependentRequired": "write anyOf",
    "dependentSchemas": "write anyOf",
    "dependencies": "write anyOf",
    "unevaluatedProperties": "write additionalProperties",
    "unevaluatedItems": "write items",
}


class GrammarError(Exception):
    """The constraint is refused; the text is one sentence, which begins with the field."""

    def __init__(self, text: str, field: str = "") -> None:
        """`field`: its path, if it is more than `constraint`."""
        super().__init__(text)
        self.field = field


class UnsupportedError(GrammarError):
    """The constraint has a part that has no effect or none that is known."""


def wrong(path: str, what: str) -> GrammarError:
    """The refusal of what stands at this path."""
    return GrammarError(f"{path}: {what}", path)


def too_large(field: str, what: str, number: int, limit: int, where: str = "") -> GrammarError:
    """The refusal of a number beyond its limit."""
    return wrong(field, f"{what} {number}{where}; the limit is {limit}")


def unsupported(path: str, what: str) -> UnsupportedError:
    """The refusal of what stands at this path, with what to write instead of a keyword."""
    advised = f"{what}; {_ADVICE[what]}" if what in _ADVICE else what
    return UnsupportedError(f"{path}: llguidance does not support {advised}", path)
