"""Every mutation applies to the present source and changes it, and an edit without exactly one place is an error."""

import ast
from collections import Counter

import pytest

from tests.mutations.edits import Edit, MisplacedEdit, edited
from tests.mutations.mutation import ROOT, Mutation, every

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


EVERY = every()


@pytest.mark.parametrize("mutation", EVERY, ids=[mutation.name for mutation in EVERY])
def test_mutation_applies_and_changes_the_module(mutation: Mutation) -> None:
    path, text = mutation.applied()
    assert ast.parse(text) and text != (ROOT / path).read_text()


@pytest.mark.parametrize(
    ("definition", "old", "message"),
    [
        ("Pool.give", "self.make(count)", "defines Pool.give 0 times"),
        ("Pool.take", "self.share(count)", "occurs 0 times in Pool.take"),
        ("Pool.take", "self.log(_)", "occurs 2 times in Pool.take"),
        ("Pool", "None", "changes nothing"),
    ],
    ids=["missing definition", "missing code", "repeated code", "no change"],
)
def test_edit_that_does_not_fit_the_source_is_an_error(definition: str, old: str, message: str) -> None:
    with pytest.raises(MisplacedEdit, match=message):
        edited(SOURCE, (Edit(definition=definition, old=old, new="None"),))


def test_edits_change_only_their_place() -> None:
    edits = (
        Edit(definition="Pool.take", old="_ < count", new="self.free <= count"),
        Edit(definition="Pool.take", old="self.free -= count", new="self.free -= count\nself.num_taken = count"),
        Edit(definition="Pool.take", old="self.log(self.free)", new="pass"),
    )
    expected = (
        SOURCE.replace("<", "<=")
        .replace("-= count", "-= count\n        self.num_taken = count")
        .replace("self.log(self.free)", "pass")
    )
    assert edited(SOURCE, edits) == expected


def test_names_are_unique_and_each_part_has_its_faults() -> None:
    assert len({mutation.name for mutation in EVERY}) == len(EVERY)
    counts = Counter(mutation.group for mutation in EVERY)
    assert min(counts[group] for group in ("client", "core", "frontend", "recovery", "worker")) >= 15


def exists(test: str) -> bool:
    path, *names = test.split("::")
    # Without the id of its parameters.
    wanted = [f" {name.partition('[')[0]}(" for name in names]
    return (ROOT / path).exists() and all(name in (ROOT / path).read_text() for name in wanted)


def test_the_tests_that_detect_a_fault_exist() -> None:
    assert [mutation.name for mutation in EVERY if not mutation.tests and mutation.group != "core"] == []
    assert [test for mutation in EVERY for test in mutation.tests if not exists(test)] == []
