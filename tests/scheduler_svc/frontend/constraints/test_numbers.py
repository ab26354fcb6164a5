"""Numbers of schemas: what llguidance takes is what the schema says, or the schema is refused by the keyword's name."""

import json
import random
from fractions import Fraction

import llguidance
import pytest
from tandem.v1.constraint_pb2 import Constraint

from scheduler_svc.frontend.constraints.limits import GrammarError
from tests.scheduler_svc.frontend.constraints.rig import matcher, takes

# Around every size at which floats, their shortest decimals or llguidance's 64 bits lose something.
EDGES = [2**31, 2**32, 2**53, 10**15, 10**16, 10**17, 2**60, 10**18, 9 * 10**18, 2**63, 2**64, 10**22, 10**30]
INTEGERS = sorted({sign * (edge + step) for edge in EDGES for step in (-2, -1, 0, 1, 2) for sign in (1, -1)} | {0, 7})
DECIMALS = ["0.1", "-0.1", "0.5", "1.25", "-3.75", "0.30000000000000004", "0.1000000000000000001", "1e-7", "12345.678"]
DECIMALS += ["1e-400", "1e-30", "9007199254740992.5", "1E+2", "123456789.123456789", "0.123456789012345678", "-0.0"]
DECIMALS += ["3.40e38"]
# Every second integer for each keyword and kind, beginning with another one, so that half of them take each.
NUMBERS = [[*map(str, INTEGERS[first::2]), *DECIMALS] for first in (0, 1)]


def compiled(text: str) -> llguidance.LLMatcher | str:
    """The matcher of a schema, or why it is refused."""
    try:
        found = matcher(Constraint(json_schema=text))
    except GrammarError as error:
        return str(error)
    return found.get_error() or found


def nearby(text: str) -> list[str]:
    """Numbers near one, as llguidance writes them: without exponent."""
    exact = Fraction(text)
    near = {exact + step for step in (0, 1, -1, 2, -2, 100, -100, 1024, -1024, Fraction(1, 8), -Fraction(1, 8))}
    return [_plain(one) for one in sorted(near | {-exact, exact / 3 // 1, Fraction(0)})]


def _plain(exact: Fraction) -> str:
    whole, rest = divmod(abs(exact) * 10**60, 10**60)
    digits = f"{int(rest):060d}".rstrip("0")
    return ("-" if exact < 0 else "") + str(int(whole)) + (f".{digits}" if digits else "")


@pytest.mark.parametrize("keyword", ["const", "enum"])
def test_a_constant_is_itself_or_refused(keyword: str) -> None:
    num_taken = 0
    for text in NUMBERS[keyword == "enum"]:
        found = compiled(f'{{"{keyword}": {text if keyword == "const" else f"[true, {text}]"}}}')
        if isinstance(found, str):
            assert found.startswith(f"constraint.json_schema.{keyword} is ") and text.lower()[:9] in found.lower()
            # What every reader of JSON keeps is served.
            assert abs(Fraction(text)) > 2**53 or len(text.strip("-.0")) > 15 or "e-" in text
            continue
        num_taken += 1
        taken = [other for other in nearby(text) if takes(found, other)]
        assert [Fraction(one) for one in taken] == [Fraction(text)], text
    assert num_taken > 20


@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize("keyword", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
def test_a_bound_holds_exactly_or_is_refused(keyword: str, kind: str) -> None:
    num_taken = 0
    for text in NUMBERS[(kind == "integer") ^ ("ex" in keyword)]:
        found = compiled(f'{{"type": "{kind}", "{keyword}": {text}}}')
        bound = Fraction(text)
        if isinstance(found, str):
            assert found.startswith(f"constraint.json_schema: {keyword} is "), found
            assert abs(bound) > 2**53 - 3 or len(text.strip("-.0")) > 15 or "e-" in text, text
            continue
        num_taken += 1
        for other in nearby(text):
            value = Fraction(other)
            if kind == "integer" and value.denominator > 1:
                continue
            holds = {
                "minimum": value >= bound, "exclusiveMinimum": value > bound,
                "maximum": value <= bound, "exclusiveMaximum": value < bound,
            }[keyword]  # fmt: skip
            # Under a bound llguidance writes integers of 64 bits and other numbers to 9e18.
            limit = 2**63 - 1024 if kind == "integer" else 9 * 10**18
            if holds and abs(value) > limit:
                continue
            # Right beside an exclusive bound it writes 15 digits.
            if holds and abs(value - bound) < 1 and len(str(abs(int(bound)))) > 14:
                continue
            assert takes(found, other) == holds, (text, other)
    assert num_taken > 20


def test_two_bounds_hold_together() -> None:
    """Random pairs of both kinds, also through allOf, where an integer may meet a bound that was read as a number."""
    draw = random.Random(1)
    keywords = [("minimum", "maximum"), ("exclusiveMinimum", "maximum"), ("minimum", "exclusiveMaximum")]
    num_taken = 0
    for _ in range(150):
        low = draw.choice(
            [Fraction(draw.randint(-50, 50), draw.choice((1, 1, 2, 10, 100))), Fraction(draw.choice(INTEGERS))]
        )
        high = low + draw.choice((0, 1, 5, Fraction(1, 2), 1000, 2**40))
        lower, upper = draw.choice(keywords)
        kind = draw.choice(("integer", "number"))
        bounds = f'"{lower}": {_plain(low)}, "{upper}": {_plain(high)}'
        whole = draw.choice(
            (f'{{"type": "{kind}", {bounds}}}', f'{{"allOf": [{{"type": "{kind}"}}, {{"type": "number", {bounds}}}]}}')
        )
        found = compiled(whole)
        if isinstance(found, str):
            assert "minimum" in found.lower() or "maximum" in found.lower() or "unsatisfiable" in found.lower(), found
            continue
        num_taken += 1
        for other in {*nearby(_plain(low)), *nearby(_plain(high)), _plain((low + high) / 2)}:
            value = Fraction(other)
            is_above = value > low if "excl" in lower else value >= low
            is_below = value < high if "excl" in upper else value <= high
            if takes(found, other):
                assert is_above and is_below and (kind == "number" or value.denominator == 1), (whole, other)
            elif kind == "number" or value.denominator == 1:
                is_near = min(abs(value - low), abs(value - high)) < 1 and len(str(abs(int(low)))) > 14
                assert not (is_above and is_below) or abs(value) > 9 * 10**18 - 1 or is_near, (whole, other)
    assert num_taken > 50


@pytest.mark.parametrize(
    ("factor", "multiples", "others"),
    [
        ("3", ["0", "3", "-6", "99999999999999999999999999999"], ["1", "100"]),
        ("0.01", ["0.07", "1.10", "3"], ["0.001"]),
        ("2.5", ["2.5", "7.5", "10"], ["1", "2.6"]),
        ("65537", ["4295032832"], ["4295032833"]),
        ("1e-7", ["0.0000003"], ["0.00000001"]),
        ("0.07", [], []),
        ("4294967296", [], []),
        ("1234567890123456789", [], []),
        ("0", [], []),
        ("-2", [], []),
    ],
)
def test_multiples_are_of_the_number_or_it_is_refused(factor: str, multiples: list[str], others: list[str]) -> None:
    found = compiled(f'{{"type": "number", "multipleOf": {factor}}}')
    if isinstance(found, str):
        assert not multiples and found.startswith(f"constraint.json_schema: multipleOf is {factor}")
        return
    assert [takes(found, text) for text in multiples + others] == [True] * len(multiples) + [False] * len(others)


def test_common_multiples_beyond_32_bits_are_refused() -> None:
    parts = [{"type": "integer", "multipleOf": 65537}, {"multipleOf": 65539}]
    assert "multipleOf has several numbers" in str(compiled(json.dumps({"allOf": parts})))
    # Python writes no number of so many digits.
    parts = [{"type": "integer", "multipleOf": (1 << 32) - number} for number in range(1, 501)]
    assert "their product is a number of 16000 bits; the limit is" in str(compiled(json.dumps({"anyOf": parts})))
    found = compiled(json.dumps({"allOf": [{"type": "integer", "multipleOf": 6}, {"multipleOf": 10}]}))
    assert not isinstance(found, str)
    assert [takes(found, text) for text in ("30", "60", "10", "6")] == [True, True, False, False]
