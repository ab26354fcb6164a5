"""What a pretend worker knows of its full pages, from the labels in plans, and what it reports when it joins.

Every label is compared with the page's content when it arrives.
"""

import numpy as np
from tandem.internal.v1 import worker_pb2 as pb

from tests.rigs.page_pool import Slots
from tests.rigs.plan_arrays import PlanArrays, PlanError

_HASH_BYTES = 32


class Labels:
    """Hash and tokens by page, in the order in which the labels came."""

    def __init__(self, page_size: int) -> None:
        self.page_root = b""
        self.by_page: dict[int, tuple[bytes, bytes]] = {}
        self._page_size = page_size

    def joined(self, message: pb.Joined) -> None:
        """A session with a core begins."""
        if not message.keeps_pages:
            self.by_page.clear()
        self.page_root = message.page_root

    def follow(self, plan: pb.StepPlan, arrays: PlanArrays, content: Slots) -> None:
        """Takes the plan's labels, then drops those of pages that it gives away. `content` is that before the plan.

        Raises PlanError if a label does not fit the content.
        """
        if plan.labels.forget or plan.HasField("take_over"):
            self.by_page.clear()
        if plan.HasField("labels") and not self.page_root:
            raise PlanError("the plan has labels, but Joined named no root")
        self._add(plan.labels, content)
        for page in _changed(arrays, self._page_size):
            self.by_page.pop(page, None)

    def _add(self, labels: pb.PageLabels, content: Slots) -> None:
        pages = np.frombuffer(labels.pages, "<i4").tolist()
        size = 4 * self._page_size
        if len(labels.hashes) != _HASH_BYTES * len(pages) or len(labels.tokens) != size * len(pages):
            raise PlanError(f"labels of {len(pages)} pages have other lengths")
        for i, page in enumerate(pages):
            tokens = labels.tokens[i * size : (i + 1) * size]
            if not content.marks[page].all() or content.tokens[page].astype("<i4").tobytes() != tokens:
                raise PlanError(f"page {page} is labelled with tokens that are not in it")
            self.by_page[page] = labels.hashes[i * _HASH_BYTES : (i + 1) * _HASH_BYTES], tokens

    def report(self, join: pb.Join, generation: int) -> None:
        """Writes what the worker has kept into its Join."""
        join.ClearField("kept")
        if not self.by_page:
            return
        join.kept.page_root, join.kept.generation = self.page_root, generation
        labels = join.kept.labels
        labels.pages = np.array(list(self.by_page), "<i4").tobytes()
        labels.hashes = b"".join(page_hash for page_hash, _ in self.by_page.values())
        labels.tokens = b"".join(tokens for _, tokens in self.by_page.values())


def _changed(arrays: PlanArrays, page_size: int) -> set[int]:
    """Pages that the plan writes to, or gives to rows that will."""
    pages = {page for page, _ in arrays.loads} | {target for _, target, _ in arrays.copies}
    pages |= {page for _, page in arrays.appends} | set(arrays.zero_pages)
    for started in arrays.started:
        pages.update(started.pages[started.first_position // page_size :])
    return pages
