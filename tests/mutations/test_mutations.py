"""Every mutation applies to the present source and changes it, and an edit without exactly one place is an error."""

import ast

import pytest

from tests.mutations.edits import (
    Edit,
    MisplacedEdit,
    argument,
    call,
    condition,
    drop,
    edited,
    insert_before,
    replace,
)
from tests.mutations.mutations import MUTATIONS, Mutation
from tests.mutations.runner import ROOT, mutated

SOURCE = """
class Pool:
    def take(self, count):
        if self.free < count:
            return None
        self.log(count)
        self.log(self.free)
        self.free -= count
        return self.make(count)
"""


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.name for mutation in MUTATIONS])
def test_mutation_applies_and_changes_the_module(mutation: Mutation) -> None:
    before = (ROOT / mutation.path).read_text()
    after = mutated(mutation, before)
    assert ast.dump(ast.parse(after)) != ast.dump(ast.parse(before))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (replace("Pool.give", call("make"), "it"), "defines Pool.give 0 times"),
        (drop("Pool.take", call("share")), "occurs 0 times in Pool.take"),
        (drop("Pool.take", call("log")), "occurs 2 times in Pool.take"),
        (drop("Pool.take", call("make")), "not a statement of its own"),
        (replace("Pool.take", call("make"), "size"), "does not use size"),
    ],
    ids=["missing definition", "missing place", "repeated place", "part of a statement", "unknown name"],
)
def test_edit_that_does_not_fit_the_source_is_an_error(edit: Edit, message: str) -> None:
    with pytest.raises(MisplacedEdit, match=message):
        edited(SOURCE, (edit,))


def test_edits_change_only_their_place() -> None:
    edits = (
        replace("Pool.take", condition("free"), "left <= right"),
        replace("Pool.take", argument("make", 0), "it + 1"),
        insert_before("Pool.take", call("make"), "self.num_taken = count"),
    )
    changed = edited(SOURCE, edits)
    expected = SOURCE.replace("<", "<=").replace(
        "        return self.make(count)", "        self.num_taken = count\n        return self.make(count + 1)"
    )
    assert changed == ast.unparse(ast.parse(expected))


def test_mutation_names_are_unique_and_at_least_fifteen() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 15
