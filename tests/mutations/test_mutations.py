"""Every mutation applies to the present source and changes it, and an edit without exactly one place is an error."""

import ast

import pytest

from tests.mutations.constraints import CONSTRAINTS
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
from tests.mutations.mutation import Mutation
from tests.mutations.mutations import MUTATIONS
from tests.mutations.recovery import RECOVERY
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


EVERY = (*MUTATIONS, *CONSTRAINTS, *RECOVERY)


@pytest.mark.parametrize("mutation", EVERY, ids=[mutation.name for mutation in EVERY])
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


def test_mutation_names_are_unique_and_at_least_fifteen_remove_a_protection_of_recovery() -> None:
    assert len({mutation.name for mutation in EVERY}) == len(EVERY)
    assert len(RECOVERY) >= 15


@pytest.mark.parametrize(
    "mutation", [*RECOVERY, *CONSTRAINTS], ids=[mutation.name for mutation in (*RECOVERY, *CONSTRAINTS)]
)
def test_the_tests_that_detect_a_removed_protection_exist(mutation: Mutation) -> None:
    assert mutation.test
    for test in mutation.test.split():
        path, _, name = test.partition("::")
        assert (ROOT / path).exists()
        # Without the id of its parameters.
        name = name.partition("[")[0]
        assert not name or f"def {name}(" in (ROOT / path).read_text()
