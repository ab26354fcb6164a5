"""Translates the labels of pages: those of a plan to bytes, and those of a Join to the core's event."""

import numpy as np
from tandem.internal.v1 import worker_pb2 as pb

from scheduler_svc.core.messages.page_hash import HASH_BYTES
from scheduler_svc.core.messages.plan import KeptPages, PageLabels
from scheduler_svc.wire.arrays import WireError, array, packed

_ROOT_BYTES = 16


def fill_labels(out: pb.PageLabels, labels: PageLabels) -> None:
    """Encodes the labels."""
    out.forget = labels.forget
    out.pages = packed(labels.pages)
    out.hashes = b"".join(labels.hashes)
    out.tokens = b"".join(labels.tokens)


def kept_pages_of(join: pb.Join) -> KeptPages | None:
    """Returns the pages that the worker has kept, None without any. The Join's sizes have been checked.

    Raises WireError if a length or a page is wrong.
    """
    if not join.HasField("kept"):
        return None
    kept, page_bytes = join.kept, 4 * join.page_size
    pages = array(kept.labels.pages, np.int32, "kept.labels.pages")
    if len(kept.page_root) != _ROOT_BYTES:
        raise WireError(f"kept.page_root has {len(kept.page_root)} bytes; it must have {_ROOT_BYTES}")
    if len(pages) and not 1 <= int(pages.min()) <= int(pages.max()) < join.num_pages:
        raise WireError(f"kept.labels.pages must be 1 to {join.num_pages - 1}")
    if len(np.unique(pages)) != len(pages):
        raise WireError("kept.labels.pages has a page twice")
    return KeptPages(
        page_root=kept.page_root.hex(),
        generation=kept.generation,
        labels=PageLabels(
            pages=pages,
            hashes=_split(kept.labels.hashes, HASH_BYTES, len(pages), "kept.labels.hashes"),
            tokens=_split(kept.labels.tokens, page_bytes, len(pages), "kept.labels.tokens"),
        ),
    )


def _split(data: bytes, size: int, count: int, name: str) -> tuple[bytes, ...]:
    if len(data) != size * count:
        raise WireError(f"{name} has {len(data)} bytes; {count} pages need {size * count}")
    return tuple(data[at : at + size] for at in range(0, len(data), size))
