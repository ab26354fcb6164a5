"""The parts of an experiment: workloads on a machine, and variants of the core.

Owns their definitions. Both are flags of `tandem simulate`, so any run of a table can be repeated by hand.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

# Returns a context in which the run is of its variant.
Change = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """`flags` are the simulator's. If `trace_requests` is not 0, requests come from a Mooncake-like trace of that size.

    --quick may lower `requests`. The ratio of demand to memory stays.
    """

    name: str
    words: str
    flags: str
    requests: int
    trace_requests: int = 0
    trace_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """`flags` are added to the scenario's. `change` lasts for the run, and replaces what has no flag."""

    name: str
    flags: str = ""
    change: Change = nullcontext
    constants: Mapping[str, float] = field(default_factory=dict[str, float])
    """Constants of the core by name, with the values of this variant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A figure that decides the claim, at one scenario. `is_cost`: lower is better."""

    scenario: str
    figure: str
    is_cost: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """The first variant is the core's default. The claim is that it beats each other one."""

    name: str
    claim: str
    scenarios: tuple[Scenario, ...]
    variants: tuple[Variant, ...]
    judged: tuple[Judged, ...]
    figures: tuple[str, ...] = ()
    """Figures shown besides those of every experiment."""
