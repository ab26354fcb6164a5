"""Checks that a request reads only cached pages of its own tenant, and only if reader and writer allow it.

Owns, for one worker, the request that each page was written for, taken from its plans. The executor proves that the
content of a page is right; this module proves that the page may be shared. Knows nothing of rows' contents.
"""

from collections import Counter
from collections.abc import Callable

from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.plan import Plan, RowStart


class Provenance:
    """`follow` takes each plan in order and raises AssertionError if a row gets a page that it may not read."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._pages: dict[int, ev.Submit] = {}
        self._host: dict[int, ev.Submit] = {}
        self._rows: dict[int, ev.Submit] = {}
        # By the hash that a label named.
        self._labelled: dict[bytes, ev.Submit] = {}

    @property
    def writers(self) -> dict[int, ev.Submit]:
        """The request that each page of the pool was written for."""
        return self._pages

    def take_over(self, writers: dict[int, ev.Submit]) -> None:
        """The worker takes over a lost worker's pool, with pages that were written for these requests."""
        self._pages = dict(writers)

    def keep(self, hashes: dict[int, bytes]) -> None:
        """The worker joins again with these pages alone. Plans that it never got may have given them to others."""
        self._pages = {page: self._labelled[page_hash] for page, page_hash in hashes.items()}

    def follow(self, plan: Plan, submit_at: Callable[[int], ev.Submit], seen: Counter[str]) -> None:
        """`submit_at` returns the request in a row. `seen` counts what the plan does."""
        if plan.labels is not None:
            for page, page_hash in zip(plan.labels.pages.tolist(), plan.labels.hashes, strict=True):
                self._labelled[page_hash] = self._pages[page]
            seen["page labelled"] += len(plan.labels.hashes)
        self._move(plan, seen)
        for start in plan.starts:
            self._rows[start.row] = submit_at(start.row)
        written: set[int] = set()
        for start in plan.starts:
            written |= self._give(start)
        for row, page in zip(plan.append_rows.tolist(), plan.append_pages.tolist(), strict=True):
            assert row in self._rows, f"page {page} is appended to row {row}, which no plan has started"
            self._pages[page] = self._rows[row]
            written.add(page)
        for start in plan.starts:
            self._share(start, written, seen)
        seen["page zeroed"] += len(plan.zero_pages)

    def _move(self, plan: Plan, seen: Counter[str]) -> None:
        moves = plan.moves
        for page, slot in zip(moves.saved_pages.tolist(), moves.saved_slots.tolist(), strict=True):
            seen["host page reused"] += slot in self._host
            self._host[slot] = self._pages[page]
            seen["page saved"] += 1
        for source, target in zip(moves.copied_from.tolist(), moves.copied_to.tolist(), strict=True):
            self._pages[target] = self._pages[source]
            seen["page copied"] += 1
        for slot, page in zip(moves.loaded_slots.tolist(), moves.loaded_pages.tolist(), strict=True):
            assert slot in self._host, f"page {page} is loaded from host page {slot}, but no plan has saved to it"
            self._pages[page] = self._host[slot]
            seen["page loaded"] += 1

    def _give(self, start: RowStart) -> set[int]:
        """Returns the pages that the row will write; the row must be allowed to read a copy in the first of them."""
        reader, pages = self._rows[start.row], start.pages.tolist()
        num_shared, rest = divmod(start.first_position, self._page_size)
        if rest:
            self._check(reader, pages[num_shared])
        self._pages |= dict.fromkeys(pages[num_shared:], reader)
        return set(pages[num_shared:])

    def _share(self, start: RowStart, written: set[int], seen: Counter[str]) -> None:
        reader = self._rows[start.row]
        shared = [page for page in start.pages[: start.first_position // self._page_size].tolist() if page]
        for page in shared:
            self._check(reader, page)
            seen["page shared in the step that writes it"] += page in written
            seen["own page found again" if _is_same(self._pages[page], reader) else "page shared"] += 1
        seen["started past a window"] += len(shared) < start.first_position // self._page_size

    def _check(self, reader: ev.Submit, page: int) -> None:
        writer = self._pages[page]
        if _is_same(writer, reader):
            return
        assert reader.cache_read, f"{reader.request_id} reads cached page {page}, and its cache_read is false"
        assert writer.cache_write, f"page {page} of {writer.request_id} was cached, and its cache_write is false"
        assert reader.prefix_root == writer.prefix_root != b"", (
            f"page {page} of {writer.request_id} went to {reader.request_id}, another tenant's"
        )


def _is_same(one: ev.Submit, other: ev.Submit) -> bool:
    """Returns whether both are the same request. A request that is resumed has another front end and stream."""
    return one.prompt is other.prompt
