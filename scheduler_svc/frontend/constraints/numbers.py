"""Says which numbers of a JSON schema llguidance keeps. Owns no state.

llguidance reads each number as a float, writes the shortest decimal of it, and keeps integers in 64 bits. A number that
it does not keep is refused by name. A bound beyond 64 bits moves to the last number that it writes under any bound.
"""

import math
import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from itertools import chain
from typing import Any, cast

from scheduler_svc.frontend.chat.conversation import levels
from scheduler_svc.frontend.constraints.limits import GrammarError, wrong
from tandem_contract.plural import numbered

# The largest integer as llguidance's floats end in it, and the smallest that it does not take for one of 65 bits.
_MOST_INTEGER, _LEAST_INTEGER = 2**63 - 1, -(2**63 - 1_024)
# Bounds of numbers other than integers; llguidance reads the part before the point as 64 bits.
_MOST_NUMBER = 9 * 10**18
# Bounds from here on need one on the other side.
_NEEDS_OTHER = 10**18
_MOST_STEP = 2**53
# Digits of a decimal. llguidance's reader of JSON divides the digits by a power of ten, and rounds beyond these limits.
_MOST_DIGITS, _MOST_DECIMALS = 15, 22
# What is more than 0 is at least this.
_LEAST_NUMBER = 1e-20
_MOST_FACTOR = 2**32 - 1
# Characters without a short escape in JSON.
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
# (name, the name of the exclusive one, 1 for a lower bound or -1 for an upper one)
_SIDES = (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1))
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
Number = int | float


class Written(float):
    """A float that remembers how it was written."""

    text: str

    @classmethod
    def read(cls, text: str) -> "Written":
        number = cls(text)
        number.text = text
        return number


def check_values(place: str, value: object) -> None:
    """Refuses a value of enum or const with a part that llguidance does not keep. Raises GrammarError."""
    for one in chain.from_iterable(levels(value)):
        if isinstance(one, str):
            if (control := _CONTROL.search(one)) is not None:
                what = f"has the character U+{ord(control[0]):04X}, which llguidance does not write; leave it out"
                raise GrammarError(f"{place} {what}", place)
        elif isinstance(one, int | float) and not isinstance(one, bool):
            exact = _exact(one)
            if exact is None or not (_is_integer(exact) if exact.denominator == 1 else _is_decimal(exact)):
                raise GrammarError(f"{place} {_lost(one, 'write it as a string')}", place)


def plain(value: Any) -> Any:
    """A value of enum or const with integers where it has floats of the same value."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [plain(one) for one in cast("list[Any]", value)]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def bounds(place: str, schema: Mapping[str, Any]) -> dict[str, Number]:
    """The bounds of a schema as llguidance keeps them. Raises GrammarError."""
    given = {name: schema[name] for name in BOUNDS if name in schema}
    for inclusive, exclusive, _ in _SIDES:
        # Draft 4 and OpenAPI 3.0 say with a boolean what the other bound is.
        if isinstance(is_exclusive := given.get(exclusive), bool):
            del given[exclusive]
            if is_exclusive and inclusive in given:
                given[exclusive] = given.pop(inclusive)
    if not given:
        return {}
    is_integer = schema.get("type") == "integer"
    kept = dict[str, Number]()
    for inclusive, exclusive, sign in _SIDES:
        for name in (inclusive, exclusive):
            if name in given:
                _add(place, kept, name, given[name], inclusive, sign, is_integer=is_integer)
    least, most = (_LEAST_INTEGER, _MOST_INTEGER) if is_integer else (-_MOST_NUMBER, _MOST_NUMBER)
    lower = max((kept[name] for name in ("minimum", "exclusiveMinimum") if name in kept), default=None)
    upper = min((kept[name] for name in ("maximum", "exclusiveMaximum") if name in kept), default=None)
    if lower is not None and upper is None and lower >= _NEEDS_OTHER:
        kept["maximum"] = most
    if upper is not None and lower is None and upper <= -_NEEDS_OTHER:
        kept["minimum"] = least
    return kept


def _add(
    place: str, kept: dict[str, Number], name: str, value: Number, inclusive: str, sign: int, *, is_integer: bool
) -> None:
    """Adds a bound. `sign` makes an upper one a lower one of the negated numbers, so all here is said of lower ones."""
    exact = _exact(value)
    if exact is None:
        raise _lost_at(place, name, value)
    exact, is_exclusive = sign * exact, name != inclusive
    if is_integer:
        # It becomes inclusive, because that needs no addition in floats.
        bound = math.floor(exact) + 1 if is_exclusive else math.ceil(exact)
        bound = max(bound, _LEAST_INTEGER if sign > 0 else -_MOST_INTEGER)
        if sign * bound != _MOST_INTEGER and not _is_integer(Fraction(bound)):
            raise _lost_at(place, name, value)
        kept[inclusive] = sign * max(bound, sign * kept.get(inclusive, sign * bound))
        return
    if -exact > _MOST_NUMBER:
        kept.setdefault(inclusive, -sign * _MOST_NUMBER)
        return
    is_kept = _is_decimal(exact) and (exact.denominator > 1 or _is_integer(exact))
    if not is_kept or (is_exclusive and abs(exact) >= _MOST_STEP):
        raise _lost_at(place, name, value)
    if is_exclusive and exact.denominator == 1 and exact >= 0:
        # llguidance takes 2 where more than 2 and at most 2.5 is wanted. The next decimal takes its place.
        step = Fraction(1, 10 ** max(0, _MOST_DIGITS - len(str(int(exact)))))
        after: Number = plain(float(exact + step) if exact else _LEAST_NUMBER)
        kept[inclusive] = sign * max(after, sign * kept.get(inclusive, sign * after))
        return
    kept[name] = sign * int(exact) if exact.denominator == 1 else value


def factor(place: str, value: Number) -> Number:
    """multipleOf, as llguidance reads it: a whole number of 32 bits, divided by a power of ten. Raises GrammarError."""
    if value <= 0:
        raise wrong(place, f"multipleOf is {shown(value)}; it must be greater than 0")
    exact = _exact(value)
    if exact is None or exact > _MOST_FACTOR:
        raise _lost_at(place, "multipleOf", value)
    number, exponent = float(value), 0
    while not number.is_integer() and exponent < 400:
        number, exponent = number * 10, exponent + 1
    if number > _MOST_FACTOR or Fraction(int(number), 10**exponent) != exact:
        raise _lost_at(place, "multipleOf", value)
    return int(exact) if exact.denominator == 1 else value


def check_factors(place: str, factors: Iterable[Number]) -> None:
    """Refuses numbers if llguidance cannot compute their common multiple in 32 bits. Raises GrammarError."""
    product, exact = 1, [one for one in map(_exact, set(factors)) if one is not None]
    scale = math.lcm(*(one.denominator for one in exact)) if exact else 1
    scale = next(10**digits for digits in range(400) if 10**digits % scale == 0)
    for one in exact:
        product *= int(one * scale)
    if len(exact) > 1 and product > _MOST_FACTOR:
        what = f"multipleOf has several numbers; their product is {shown(product)}"
        raise wrong(place, f"{what}; the limit is {_MOST_FACTOR}")


def _exact(value: Number) -> Fraction | None:
    """The number; None if it is so small that a float rounds it to 0."""
    if isinstance(value, Written) and value != 0:
        return Fraction(value.text)
    if isinstance(value, Written) and any(digit in "123456789" for digit in value.text.lower().partition("e")[0]):
        return None
    return Fraction(repr(value)) if isinstance(value, float) else Fraction(value)


def _is_integer(exact: Fraction) -> bool:
    """Whether it is the same as a float, which has 64 bits."""
    return abs(exact) < 2**63 and int(float(exact)) == exact


def _is_decimal(exact: Fraction) -> bool:
    """Whether it is the shortest decimal of a float, and read as one."""
    if exact.denominator == 1:
        return abs(exact) < 2**63 and Fraction(repr(float(exact))) == exact
    scaled = exact * 10**_MOST_DECIMALS
    return scaled.denominator == 1 and len(str(abs(scaled.numerator)).rstrip("0")) <= _MOST_DIGITS


def _lost(value: Number, instead: str) -> str:
    return f"is {shown(value)}, a number that llguidance does not keep exactly; {instead}"


def _lost_at(place: str, keyword: str, value: Number) -> GrammarError:
    return wrong(place, f"{keyword} {_lost(value, 'write one of at most 15 digits')}")


def shown(value: Number) -> str:
    """A number as it was written, and not longer than a line."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {numbered(value.bit_length(), 'bit')}"
    text = value.text if isinstance(value, Written) else str(value)
    return text if len(text) <= 80 else f"{text[:79]}…"
