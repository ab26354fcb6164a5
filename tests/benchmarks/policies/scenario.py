"""What is simulated: a workload on a machine, and the variants of the core that meet it.

Owns the two kinds and how they become flags of `tandem simulate`, so that any run of a table can be repeated by hand.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

# Gives what else a run needs to be of its variant.
Change = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """`flags` are the simulator's. `trace_requests`: they come from a Mooncake-like trace of so many, else synthetic.

    `requests` may be cut by --quick; what all rows want and what there is stays.
    """

    name: str
    words: str
    flags: str
    requests: int
    trace_requests: int = 0
    trace_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """`flags` are added to the scenario's. `change` holds while the run lasts: for what is no flag."""

    name: str
    flags: str = ""
    change: Change = nullcontext
    constants: Mapping[str, float] = field(default_factory=dict[str, float])
    """Of the core, instead of those that stand there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A figure that the claim is about, at one scenario. `is_cost`: less of it is better."""

    scenario: str
    figure: str
    is_cost: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """The first variant is what the core does unless told otherwise; the claim is that it beats each other."""

    name: str
    claim: str
    scenarios: tuple[Scenario, ...]
    variants: tuple[Variant, ...]
    judged: tuple[Judged, ...]
    figures: tuple[str, ...] = ()
    """Shown beside those that every experiment shows."""
