"""What a worker serves, and whether a sequence fits it.

Owns nothing.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Sampling settings of requests that set none, as the model's own configuration gives them."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """What a worker serves. Pages are numbered 0 to num_pages - 1, page 0 and row 0 are reserved.

    `logit_rows`: positions of one step whose logits may be wanted, at least `max_rows + chunk_align`. `window` 0:
    some layer sees the whole past; else position p sees those from p - window + 1 on and the first `sink_tokens`.
    `host_pages` fit the worker's host memory; `page_copy_us` moves one of them, `token_us` computes one prompt token.
    `max_frame_bytes`: the largest message that the worker takes. `device` is text for people.
    """

    identity: str
    model: str
    vocab_size: int
    page_size: int
    num_pages: int
    max_rows: int
    max_length: int
    token_budget: int
    chunk_align: int
    logit_rows: int
    eos_token_ids: tuple[int, ...]
    pid: int
    window: int = 0
    sink_tokens: int = 0
    host_pages: int = 0
    page_copy_us: float = 0.0
    token_us: float = 0.0
    max_frame_bytes: int = 64 << 20
    device: str = ""
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)

    @property
    def usable_pages(self) -> int:
        """Pages that requests may hold."""
        return self.num_pages - 1

    def pages_at_once(self, num_tokens: int) -> int:
        """The largest number of pages that a sequence of `num_tokens` positions holds at the same time."""
        all_pages = -(-num_tokens // self.page_size)
        if not self.window:
            return all_pages
        sink_pages = -(-self.sink_tokens // self.page_size)
        return min(all_pages, sink_pages + (self.window + self.chunk_align - 1) // self.page_size + 2)

    def holds(self, total_length: int) -> bool:
        """Whether this worker can run a sequence of `total_length` tokens to its end.

        The last token is sampled and never computed, so it needs no slot in a page.
        """
        return total_length <= self.max_length and self.pages_at_once(total_length - 1) <= self.usable_pages
