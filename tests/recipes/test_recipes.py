"""Each recipe of "Changing it" is followed on a copy of the tree: its files are those that change, its tests notice.

`make test-pages` follows each recipe once, with its first notice and its quickest tests; `make recipes` runs all tests.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.recipes.copies import Copy, Runs
from tests.recipes.recipe import RECIPES, Misplaced, Notice, Recipe, Step

TITLES = (
    "A kernel", "A policy", "A resource of a lane", "A response template", "A sampling parameter", "An RPC",
)  # fmt: skip
each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    with Runs() as process:
        yield process


def failed(outcomes: dict[str, str]) -> list[str]:
    return sorted(name for name, outcome in outcomes.items() if outcome == "failed")


def follow(recipe: Recipe, runs: Runs, folder: Path, notices: tuple[Notice, ...], tests: tuple[str, ...]) -> None:
    """Follows the recipe, at first without some steps, which tests notice; then the tests pass."""
    copy, texts = Copy(folder), recipe.texts()
    copy.write(texts)
    for notice in notices:
        assert set(notice.without) <= texts.keys(), "a step that is left out is one of the recipe"
        copy.take_back(notice.without)
        outcomes, said = runs.outcomes(copy, notice.fail)
        assert failed(outcomes) == sorted(notice.fail), f"without {', '.join(notice.without)}: {said}"
        copy.write({file: texts[file] for file in notice.without})
    outcomes, said = runs.outcomes(copy, tests)
    assert failed(outcomes) == [] and outcomes, said
    ran = {name for name, outcome in outcomes.items() if outcome == "passed"}
    wanted = [test.partition("[")[0] for test in tests]
    assert [test for test in wanted if not any(name.startswith(test) for name in ran)] == [], said


def test_there_is_one_recipe_of_each_kind_of_change() -> None:
    assert sorted(recipe.title for recipe in RECIPES) == sorted(TITLES)


@each_recipe
def test_the_page_names_the_files_that_change(recipe: Recipe) -> None:
    meant = recipe.places
    assert [each for each in recipe.edited if [each] not in meant.values()] == [], "the page does not name these"
    # A folder may stand before the names of files in it.
    unknown = [name for name, files in meant.items() if len(files) != 1]
    assert [name for name in unknown if not any(each.startswith(name) for each in recipe.edited)] == []
    assert recipe.texts().keys() == {step.file for step in recipe.steps}


@pytest.mark.pages
@each_recipe
def test_a_recipe_is_followed(recipe: Recipe, runs: Runs, tmp_path: Path) -> None:
    follow(recipe, runs, tmp_path / "tree", recipe.notices[:1], recipe.quick)


@pytest.mark.long
@each_recipe
def test_every_test_that_a_recipe_names(recipe: Recipe, runs: Runs, tmp_path: Path) -> None:
    follow(recipe, runs, tmp_path / "tree", recipe.notices, (*recipe.quick, *recipe.named))


def test_a_step_whose_anchor_is_gone_says_so() -> None:
    step = Step(file="a.py", anchor="x = 1\n", text="x = 2\n")
    assert step.applied("x = 1\ny = 1\n") == "x = 2\ny = 1\n"
    for text, count in (("y = 1\n", 0), ("x = 1\nx = 1\n", 2)):
        with pytest.raises(Misplaced, match=rf"a\.py has 'x = 1\\n' {count} times; a step needs it once"):
            step.applied(text)
    with pytest.raises(Misplaced, match=r"a\.py does not exist"):
        step.applied(None)
    with pytest.raises(Misplaced, match=r"a\.py is to be made, and exists"):
        Step(file="a.py", anchor="", text="x").applied("")
