"""JSON objects that arrive in pieces, against Python's reader of whole ones."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.frontend.chat.bodies import MAX_DEPTH, ObjectReader
from tests.scheduler_svc.frontend.chat.test_answer import cuts

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))
OBJECTS = st.dictionaries(st.text(), VALUES, max_size=4)
LAYOUTS: list[dict[str, Any]] = [{}, {"ensure_ascii": False}, {"indent": 1}, {"separators": (",", ":")}]


def read(*pieces: str) -> tuple[ObjectReader, str, str]:
    """(the reader, what is certain, what was not read) of a text in these pieces."""
    reader, certain, left, text = ObjectReader(is_strict=True), "", "", "".join(pieces)
    for piece in pieces:
        if left:
            left += piece
            continue
        more, num_read = reader.feed(piece)
        certain, left = certain + more, piece[num_read:]
        assert text.startswith(certain)
    return reader, certain, left


@given(value=OBJECTS, layout=st.sampled_from(LAYOUTS), data=st.data())
def test_an_object_is_certain_to_its_last_brace(value: Any, layout: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(value, **layout)
    reader, certain, left = read(*data.draw(cuts(text + " }x")))
    assert reader.is_complete and not reader.is_broken
    assert (certain, left) == (text, " }x")


@given(value=OBJECTS, edit=st.sampled_from(list('{}[]",:\\0-.eEtfn \n\x01aN')), data=st.data())
def test_a_changed_object_is_complete_only_if_python_reads_it(value: Any, edit: str, data: st.DataObject) -> None:
    text = json.dumps(value)
    place = data.draw(st.integers(0, len(text)))
    length = data.draw(st.integers(0, 1))
    text = text[:place] + edit + text[place + length :]
    reader, certain, left = read(*data.draw(cuts(text)))
    if reader.is_complete:
        json.loads(certain)
        assert certain + left == text
        return
    assert certain + reader.held + left == text
    try:
        json.loads(text, parse_constant=_refuse)
    except ValueError:
        return
    # White space comes before the first brace only outside of this reader.
    assert not text.startswith("{")


@pytest.mark.parametrize("escape", ["\\u", "\\u1", "\\u12", "\\u123", "\\u123g", "\\x", "\\'"])
@pytest.mark.parametrize("is_strict", [True, False])
def test_an_escape_that_json_has_not_breaks_the_object(escape: str, is_strict: bool) -> None:
    reader = ObjectReader(is_strict=is_strict)
    reader.feed(f'{{"a": "{escape}"}}')
    assert reader.is_broken and not reader.is_complete


@given(value=OBJECTS, layout=st.sampled_from(LAYOUTS), data=st.data())
def test_raw_control_characters_are_certain_as_escapes(value: Any, layout: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(value, **layout)
    for escape in set(re.findall(r"\\\\|\\u00[01][0-9a-f]|\\[nrtbf]", text)) - {"\\\\"}:
        text = re.sub(r"\\\\|" + re.escape(escape), lambda found: _raw(found.group()), text)
    reader = ObjectReader()
    certain = "".join(reader.feed(piece)[0] for piece in data.draw(cuts(text)))
    assert reader.is_complete and json.loads(certain) == json.loads(text, strict=False) == value


def _raw(escape: str) -> str:
    return escape if escape == "\\\\" else json.loads(f'"{escape}"')


def _refuse(name: str) -> None:
    raise ValueError(name)


@pytest.mark.parametrize("depth", [MAX_DEPTH, MAX_DEPTH + 1])
def test_depth_is_bounded(depth: int) -> None:
    reader, _, _ = read('{"a":' * depth + "1" + "}" * depth)
    assert reader.is_complete == (depth == MAX_DEPTH)


def test_a_long_number_is_broken_and_no_letter_is_lost() -> None:
    text = '{"a": ' + "1" * 100 + "}"
    reader, certain, left = read(text[:10], text[10:50], text[50:90], text[90:])
    assert reader.is_broken and certain + reader.held + left == text
