"""Owns what llguidance's own matcher takes under a constraint, byte after byte."""

import json

import llguidance
from tandem.v1.constraint_pb2 import Constraint

from scheduler_svc.frontend.constraints.grammar import grammar_of
from tests.rigs import byte_tokenizer

TOKENIZER = llguidance.LLTokenizer(
    byte_tokenizer.tokenizer_json().decode(), n_vocab=byte_tokenizer.VOCAB_SIZE, eos_token=byte_tokenizer.EOS_ID
)


def schema(value: object) -> Constraint:
    return Constraint(json_schema=json.dumps(value))


def matcher(constraint: Constraint) -> llguidance.LLMatcher:
    """Raises GrammarError. Whether llguidance takes the grammar, the matcher says."""
    return llguidance.LLMatcher(TOKENIZER, grammar_of(constraint), log_level=0)


def takes(made: llguidance.LLMatcher, text: str) -> bool:
    """Whether the text may be a whole output."""
    made.reset()
    data = list(text.encode())
    return made.try_consume_tokens(data) == len(data) and made.is_accepting()


def accepts(constraint: Constraint, *texts: str) -> bool:
    """Whether each text may be a whole output."""
    made = matcher(constraint)
    assert not made.is_error(), made.get_error()
    return all(takes(made, text) for text in texts)
