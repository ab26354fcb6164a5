"""Bounds of the fields of a dataclass, as annotations: `Annotated[int, Range(1, 1 << 24)]`.

`codec` reads them. They stand beside the field, so that a reader of the class sees what may come from another program.
"""

from collections.abc import Sized
from dataclasses import dataclass
from typing import Any

from tandem_contract.plural import numbered


class WireError(ValueError):
    """A message that breaks its protocol; the text names the field, the value and the limit."""


@dataclass(frozen=True, slots=True)
class Range:
    """A number from `low` to `high`; NaN is not."""

    low: float
    high: float

    def checked(self, name: str, value: Any) -> Any:
        """Returns the value. Raises WireError."""
        if not self.low <= value <= self.high:
            raise WireError(f"{name} is {value}; it must be {self.low} to {self.high}")
        return value


@dataclass(frozen=True, slots=True)
class Length:
    """A text, bytes or a list with `low` to `high` characters, bytes or entries."""

    low: int
    high: int | None = None

    def checked(self, name: str, value: Sized) -> Any:
        """Returns the value. Raises WireError."""
        size = len(value)
        if size < self.low or (self.high is not None and size > self.high):
            thing = "character" if isinstance(value, str) else "byte" if isinstance(value, bytes) else "entry"
            raise WireError(f"{name} has {numbered(size, thing)}; {self._limits}")
        return value

    @property
    def _limits(self) -> str:
        if self.high is None:
            return f"it must have at least {self.low}"
        if not self.low:
            return f"the limit is {self.high}"
        return f"it must have {self.low}" if self.low == self.high else f"it must have {self.low} to {self.high}"


@dataclass(frozen=True, slots=True)
class Cut:
    """A text for people, which is cut after `high` characters."""

    high: int

    def checked(self, name: str, value: str) -> str:
        """Returns the text or its beginning."""
        return value[: self.high]


Bound = Range | Length | Cut
