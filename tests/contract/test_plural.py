"""Numbers with their noun and verb."""

import pytest

from tandem_contract.plural import counted, numbered


@pytest.mark.parametrize(
    ("number", "thing", "verb", "text"),
    [
        (0, "token", "", "0 tokens"),
        (1, "token", "", "1 token"),
        (2000, "token", "", "2000 tokens"),
        (1, "request", "wait", "1 request waits"),
        (2, "request", "wait", "2 requests wait"),
        (1, "request", "are", "1 request is"),
        (2, "process", "go", "2 processes go"),
        (1, "process", "go", "1 process goes"),
        (3, "entry", "", "3 entries"),
        (3, "key", "", "3 keys"),
        (2, "match", "were", "2 matches were"),
        (1, "tensor of the step", "outlive", "1 tensor of the step outlives"),
        (2, "connection to this entry", "have", "2 connections to this entry have"),
        (1, "byte", "have", "1 byte has"),
        (1, "byte", "do", "1 byte does"),
    ],
)
def test_a_number_has_its_form_of_noun_and_verb(number: int, thing: str, verb: str, text: str) -> None:
    assert numbered(number, thing, verb) == text
    assert counted(number, thing, verb) == text.replace("2000", "2,000")
