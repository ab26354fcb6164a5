"""Every mutation applies to the present source, and leaves a module that Python can parse."""

import ast

import pytest

from tests.mutations.mutations import MUTATIONS, Mutation
from tests.mutations.runner import ROOT, MisplacedText, mutated


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.name for mutation in MUTATIONS])
def test_a_mutation_applies(mutation: Mutation) -> None:
    before = (ROOT / mutation.path).read_text()
    after = mutated(mutation, before)
    assert ast.dump(ast.parse(after)) != ast.dump(ast.parse(before))


def test_text_that_is_missing_or_repeated_is_an_error() -> None:
    mutation = Mutation(name="m", breaks="nothing", path="x.py", edits=(("a = 1", "a = 2"),))
    for text in ("b = 1", "a = 1\na = 1"):
        with pytest.raises(MisplacedText, match="its text occurs"):
            mutated(mutation, text)
    assert mutated(mutation, "a = 1\n") == "a = 2\n"


def test_mutation_names_are_unique_and_at_least_fifteen() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 15
