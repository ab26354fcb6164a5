"""What a pretend worker has and can do. Owns the numbers, and what a Join says of them; decides nothing."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Token ids from sampled_vocab on are valid in prompts and never drawn. `window` 0: every position is read."""

    page_size: int = 4
    num_pages: int = 64
    max_rows: int = 8
    max_length: int = 256
    token_budget: int = 64
    chunk_align: int = 1
    # Positions beyond one per row whose logits one step may tell; at least chunk_align.
    spare_logit_rows: int = 16
    vocab_size: int = 288
    sampled_vocab: int = 273
    eos_token_ids: tuple[int, ...] = (272,)
    host_pages: int = 0
    window: int = 0
    sink_tokens: int = 0
    # What it says of its speed; nothing here takes time.
    page_copy_us: float = 0.0
    token_us: float = 0.0

    @property
    def logit_rows(self) -> int:
        """What a Join says of it."""
        return self.max_rows + max(self.spare_logit_rows, self.chunk_align)

    @property
    def max_row_pages(self) -> int:
        """Pages that positions up to max_length take."""
        return -(-self.max_length // self.page_size)

    def first_read(self, position: int) -> int:
        """The first position that a query at `position` reads, the sinks aside."""
        return max(0, position - self.window + 1) if self.window else 0

    def is_behind(self, logical_idx: int, position: int) -> bool:
        """Whether no query at `position` or later reads the row's page of this index."""
        start = logical_idx * self.page_size
        return start >= self.sink_tokens and start + self.page_size <= self.first_read(position)
