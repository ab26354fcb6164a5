"""What full pages contain, as the core tells a worker, and as a worker tells a later core."""

from dataclasses import dataclass

from scheduler_svc.core.messages.arrays import Int32Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PageLabels:
    """Labels of n pages, in the order in which they were made."""

    pages: Int32Array
    """int32[n]."""
    hashes: tuple[bytes, ...]
    """The hash of each page (`page_hash`)."""
    tokens: tuple[bytes, ...]
    """The tokens of each page, little-endian int32."""
    forget: bool = False
    """Whether the worker drops all earlier labels first."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptPages:
    """The pages that a worker has kept since it lost its scheduler."""

    page_root: str
    """Names the root of the hashes (`page_hash.root_name`)."""
    generation: int
    """The newest generation whose plans may have changed the pages."""
    labels: PageLabels
