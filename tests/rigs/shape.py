"""Size and abilities of a pretend worker. Owns the numbers and their form in a Join; decides nothing."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Token ids from sampled_vocab on are valid in prompts and never sampled. `window` 0: every position is read."""

    page_size: int = 4
    num_pages: int = 64
    max_rows: int = 8
    max_length: int = 256
    token_budget: int = 64
    chunk_align: int = 1
    # Logit rows per step beyond one per row; at least chunk_align.
    spare_logit_rows: int = 16
    vocab_size: int = 288
    sampled_vocab: int = 273
    eos_token_ids: tuple[int, ...] = (272,)
    host_pages: int = 0
    window: int = 0
    sink_tokens: int = 0
    # The reported speed; the rigs take no time.
    page_copy_us: float = 0.0
    token_us: float = 0.0

    @property
    def logit_rows(self) -> int:
        """The number of logit rows that its Join reports."""
        return self.max_rows + max(self.spare_logit_rows, self.chunk_align)

    @property
    def max_row_pages(self) -> int:
        """The number of pages for max_length positions."""
        return -(-self.max_length // self.page_size)

    def first_read(self, position: int) -> int:
        """The first position that a query at `position` reads, apart from the sink tokens."""
        return max(0, position - self.window + 1) if self.window else 0

    def is_behind(self, logical_idx: int, position: int) -> bool:
        """True if no query at `position` or later reads the row's page of this index."""
        start = logical_idx * self.page_size
        return start >= self.sink_tokens and start + self.page_size <= self.first_read(position)
