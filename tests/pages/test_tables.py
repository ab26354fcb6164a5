"""The handbook's tables are those of the code."""

import pytest

from tests.pages.tables import HANDBOOK, with_tables


def test_the_handbook_has_the_tables_of_the_code() -> None:
    page = HANDBOOK.read_text()
    assert page == with_tables(page), "`make fix` writes the tables"


def test_a_page_without_a_marker_is_refused() -> None:
    with pytest.raises(ValueError, match="<!-- metrics -->"):
        with_tables("# A page\n")
