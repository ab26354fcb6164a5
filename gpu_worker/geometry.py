"""The fixed sizes of one worker: the limits of its plans, and the static shapes of its kernels.

Owns the arithmetic between pages, rows and budgets. Knows nothing of torch, models or sockets.
"""

from dataclasses import dataclass

# worker.proto's checksum packs (row << 40) ^ (logical page << 20) ^ page.
MAX_PAGE_IDS = 1 << 20
MAX_HOST_PAGES = 1 << 24
# As the scheduler takes them in Join; tokens of one sequence, of a page, and of a step.
MAX_LENGTH, _MAX_PAGE_SIZE, _MAX_BUDGET = 1 << 24, 1 << 16, 1 << 24
# Query positions per tile of the prefill kernel. On a GPU each K and V that a tile loads serves twice as many queries.
CPU_CHUNK_ALIGN, GPU_CHUNK_ALIGN = 64, 128
# Prompt tokens with logprobs in one step, beside the rows that sample; each needs logits of the whole vocabulary.
_PROMPT_LOGIT_ROWS = 256
PAGES_AT_ONCE = 4
"""How many checksums of pages are computed at once. Each takes the bytes of one head's page, in all layers."""
# Texts of the self-check (`compatibility/self_check.py`) with their decode steps, and pages that are copied to time it
# (`timings.py`). A test compares all such plans with `num_first_pages`.
_CHECKED_TEXTS, _CHECKED_TOKENS, _TIMED_PAGES = 2, 320, 8


def default_chunk_align(*, on_cpu: bool) -> int:
    """Query positions per tile of the prefill kernel on this kind of device."""
    return CPU_CHUNK_ALIGN if on_cpu else GPU_CHUNK_ALIGN


def default_max_rows(*, on_cpu: bool) -> int:
    return 32 if on_cpu else 256


def align_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Sizes agreed on at Join; they never change while the process lives."""

    # Tokens per page.
    page_size: int
    # Pages in the pool, the reserved page 0 included.
    num_pages: int
    # Rows are 1..max_rows; row 0 is padding.
    max_rows: int
    # Tokens a sequence may have, prompt and output together.
    max_length: int
    # Tokens a step may cost: one per decode row, plus each chunk rounded up to chunk_align.
    token_budget: int
    # Query positions per tile of the prefill kernel; chunks are laid out in multiples of it.
    chunk_align: int
    vocab_size: int
    # Pages of host memory, numbered from 0.
    host_pages: int = 0
    # No query sees more than the last `window` positions and the first `sink_tokens` ones. 0: some layer sees the whole
    # past.
    window: int = 0
    sink_tokens: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError, which names the setting and the limit, if the sizes contradict each other."""
        if not 16 <= self.page_size <= _MAX_PAGE_SIZE or self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size is {self.page_size}; it must be a power of two, 16 to {_MAX_PAGE_SIZE}")
        for name, value, low, high in (
            ("num_pages", self.num_pages, 2, MAX_PAGE_IDS),
            ("max_rows", self.max_rows, 1, 1 << 16),
            ("max_length", self.max_length, 2, MAX_LENGTH),
            ("host_pages", self.host_pages, 0, MAX_HOST_PAGES),
        ):
            if not low <= value <= high:
                raise ValueError(f"{name} is {value}; it must be {low} to {high}")
        if self.pages_per_row > MAX_PAGE_IDS - 1:
            raise ValueError(f"max_length is {self.max_length}; a row may have {MAX_PAGE_IDS - 1} pages at most")
        # A step in which every row decodes still has room for a prompt's chunk.
        least_budget = self.max_rows + self.chunk_align
        if self.token_budget < least_budget:
            raise ValueError(
                f"token_budget is {self.token_budget}; it must be at least {least_budget} "
                f"(max_rows {self.max_rows} and one chunk of {self.chunk_align})"
            )
        if self.token_budget > _MAX_BUDGET:
            raise ValueError(f"token_budget is {self.token_budget}; it must be at most {_MAX_BUDGET}")

    @property
    def pages_per_row(self) -> int:
        """Pages that a sequence of max_length tokens fills."""
        return align_up(self.max_length, self.page_size) // self.page_size

    @property
    def prefill_tokens(self) -> int:
        """Query positions of the prefill kernel, into which the aligned chunks of any step fit."""
        return align_up(self.token_budget, self.chunk_align)

    @property
    def history_places(self) -> int:
        """Places for the tokens of rows with penalties, row 0's included."""
        return (self.max_rows + 1) * self.max_length

    @property
    def logit_rows(self) -> int:
        """The most positions of one step that need logits: one for each row, and prompt tokens with logprobs.

        A step computes no more than its budget, which is at least max_rows and one chunk of a prompt.
        """
        return min(self.token_budget, align_up(self.max_rows + _PROMPT_LOGIT_ROWS, self.chunk_align))


def num_first_pages(geometry: Geometry) -> int:
    """The pages 0 to n - 1 that plans of the warm-up, the self-check, timings and the probation name, n at most.

    Until a worker on standby on a GPU gets requests, only these pages have memory: two whole pools do not fit one card.
    """
    of_checks = _CHECKED_TEXTS * align_up(_CHECKED_TOKENS, geometry.page_size) // geometry.page_size
    prompts = -(-geometry.token_budget // geometry.max_length)
    of_prompts = align_up(geometry.token_budget, geometry.page_size) // geometry.page_size + prompts
    return min(geometry.num_pages, 1 + max(of_checks, of_prompts, _TIMED_PAGES))


def check_window(window: int, sinks: int, max_length: int) -> None:
    """Raises ValueError if the window hides nothing in a sequence of `max_length` tokens."""
    if window + sinks >= max_length:
        raise ValueError(
            f"window is {window} and window_sinks {sinks}; together they must be less than max_length {max_length}, "
            "otherwise the window hides nothing"
        )
