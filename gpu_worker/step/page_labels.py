"""What the scheduler has said about full pages (`StepPlan.labels`), for the next scheduler if this one dies.

Owns the labels and the rule when one ends. Knows nothing of memory: a page with a label has not been given to a row
that writes it since the label came, so its content is still that of the label's tokens.
"""

import numpy as np
from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.geometry import Geometry
from gpu_worker.shared_pool.guard import pages_begun
from gpu_worker.wire.fields import PlanError, int32_array
from gpu_worker.wire.frames import Plan
from tandem_contract.plural import numbered

_HASH_BYTES = 32
# A Join has labels of about this size at most, so that there is room for a tokenizer in its frame.
_MAX_REPORT_BYTES = 64 << 20


class PageLabels:
    """Hash and tokens by page, the oldest label first."""

    def __init__(self, geometry: Geometry) -> None:
        self._num_pages, self._page_size = geometry.num_pages, geometry.page_size
        # Names the scheduler's root of page hashes; empty if it sends no labels.
        self._page_root = b""
        self._by_page: dict[int, tuple[bytes, bytes]] = {}

    def forget(self) -> None:
        self._by_page.clear()

    def begin_session(self, message: pb.Joined) -> None:
        """The labels that follow belong to the root of this scheduler."""
        if not message.keeps_pages:
            self.forget()
        self._page_root = message.page_root

    def follow(self, message: pb.PageLabels, plan: Plan) -> None:
        """Takes the labels that come with a plan, then drops those of pages that the plan changes, or that it gives to
        rows that will. Raises PlanError if a length or a page is wrong."""
        if message.pages or message.forget:
            self._add(message)
        if self._by_page and (plan.append_pages.size or plan.started is not None or plan.page_orders):
            for page in pages_begun(plan, self._page_size):
                self._by_page.pop(page, None)

    def _add(self, message: pb.PageLabels) -> None:
        pages = int32_array(message.pages, "labels.pages", 1, self._num_pages - 1).tolist()
        size = 4 * self._page_size
        for name, data, item_bytes in (("hashes", message.hashes, _HASH_BYTES), ("tokens", message.tokens, size)):
            if len(data) != item_bytes * len(pages):
                raise PlanError(
                    f"labels.{name} has {numbered(len(data), 'byte')}; "
                    f"{numbered(len(pages), 'page', 'need')} {item_bytes * len(pages)}"
                )
        if message.forget:
            self.forget()
        for i, page in enumerate(pages):
            page_hash = message.hashes[i * _HASH_BYTES : (i + 1) * _HASH_BYTES]
            self._by_page[page] = page_hash, message.tokens[i * size : (i + 1) * size]

    def report(self, join: pb.Join, generation: int) -> None:
        """Writes the labels into a Join, as many as fit. `generation` is the newest one of its plans."""
        join.ClearField("kept")
        if not self._page_root or not self._by_page:
            return
        most = _MAX_REPORT_BYTES // (4 + _HASH_BYTES + 4 * self._page_size)
        pages = list(self._by_page)[:most]
        labels = [self._by_page[page] for page in pages]
        join.kept.page_root, join.kept.generation = self._page_root, generation
        join.kept.labels.pages = np.array(pages, "<i4").tobytes()
        join.kept.labels.hashes = b"".join([page_hash for page_hash, _ in labels])
        join.kept.labels.tokens = b"".join([tokens for _, tokens in labels])
