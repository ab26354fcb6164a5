"""What a worker reports about itself when it joins, and whether a sequence fits on it."""

from dataclasses import dataclass, field
from typing import Annotated

from scheduler_svc.core.messages.operators import MAX_DETAIL_CHARS, MAX_FOLDER_CHARS, MAX_VERSION_CHARS
from tandem_contract.bounds import Cut, Length, Range

MAX_POOL_BYTES = 64
"""The longest name of a pool."""
_MAX_NAME_CHARS = 512
_TOKENS, _SMALL = Range(1, 1 << 24), Range(1, 1 << 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Sampling settings for requests that leave them unset, from the model's `generation_config.json`."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """The model and limits of one worker, as in `Join` of worker.proto."""

    identity: Annotated[str, Length(1, _MAX_NAME_CHARS)]
    """Hash of weights, config, tokenizer and page size. All workers of a service have the same."""
    model: Annotated[str, Length(1, _MAX_NAME_CHARS)]
    vocab_size: Annotated[int, _TOKENS]
    page_size: Annotated[int, _SMALL]
    """Tokens per page."""
    num_pages: Annotated[int, Range(2, 1 << 20)]
    """Pages in the KV cache, numbered from 0. Page 0 is for the positions that pad a step."""
    max_rows: Annotated[int, _SMALL]
    """Sequences that run at the same time, in rows 1 to `max_rows`. Row 0 is for the positions that pad a step."""
    max_length: Annotated[int, Range(2, 1 << 24)]
    """Largest length of a sequence, prompt and output together."""
    token_budget: Annotated[int, _TOKENS]
    """Largest number of positions that a step computes: 1 per decode row, plus each chunk rounded up to
    `chunk_align`."""
    chunk_align: Annotated[int, _SMALL]
    """Every chunk of a prompt but the last has a multiple of this many positions."""
    logit_rows: Annotated[int, _TOKENS]
    """Positions per step for which the worker computes logits, at least `max_rows + chunk_align`."""
    eos_token_ids: Annotated[tuple[int, ...], Length(0, 1024)]
    pid: int
    window: Annotated[int, Range(0, 1 << 24)] = 0
    """0 if a layer attends to the whole sequence. With a window, position p attends only to the positions
    p - window + 1 to p and to the first `sink_tokens` positions."""
    sink_tokens: int = 0
    host_pages: Annotated[int, Range(0, 1 << 24)] = 0
    """Pages that fit in the worker's host memory."""
    page_copy_us: Annotated[float, Range(0, 1e12)] = 0.0
    """Measured time to move one page between device and host memory."""
    token_us: Annotated[float, Range(0, 1e12)] = 0.0
    """Measured time to compute one prompt token."""
    max_frame_bytes: Annotated[int, Range(1 << 20, 1 << 40)] = 64 << 20
    """Size of the largest message that the worker accepts."""
    pool_id: Annotated[bytes, Length(0, MAX_POOL_BYTES)] = b""
    """Names the memory of its pages if the memory outlives the worker. Empty otherwise."""
    pool_bytes: int = 0
    """Size of that memory."""
    pool_layout: Annotated[bytes, Length(0, MAX_POOL_BYTES)] = b""
    """Hash of the layout of that memory. Only a worker with an equal hash can take its pages over."""
    device: Annotated[str, Cut(_MAX_NAME_CHARS)] = ""
    """Human-readable description."""
    weights_version: Annotated[str, Length(0, MAX_VERSION_CHARS)] = ""
    """The version of the weights; empty for those that the worker was started with, to which `identity` belongs."""
    weights_folder: Annotated[str, Length(0, MAX_FOLDER_CHARS)] = ""
    """The folder that they came from; empty with `weights_version`."""
    constraint_refusal: Annotated[str, Cut(MAX_DETAIL_CHARS)] = ""
    """Why the worker takes no constraints, in one sentence; empty if it takes them."""
    is_standby: bool = False
    """Whether the worker gets no request before a serving worker is lost."""
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)

    @property
    def usable_pages(self) -> int:
        """Number of pages that rows may hold. Page 0 does not count."""
        return self.num_pages - 1

    def pages_at_once(self, num_tokens: int) -> int:
        """Returns the largest number of pages that a sequence of `num_tokens` positions holds at the same time.

        With a window this is a constant for long sequences, because pages behind the window are released.
        """
        all_pages = -(-num_tokens // self.page_size)
        return min(all_pages, self._pages_in_window) if self.window else all_pages

    @property
    def _pages_in_window(self) -> int:
        sink_pages = -(-self.sink_tokens // self.page_size)
        return sink_pages + (self.window + self.chunk_align - 1) // self.page_size + 2

    @property
    def longest_sequence(self) -> int:
        """Number of tokens of the longest sequence that the worker can run to its end, prompt and output together.

        The last token is sampled and never computed, so it needs no space in a page.
        """
        if self.window and self._pages_in_window <= self.usable_pages:
            return self.max_length
        return min(self.max_length, self.usable_pages * self.page_size + 1)

    def holds(self, total_length: int) -> bool:
        """Returns whether the worker can run a sequence of `total_length` tokens to its end."""
        return total_length <= self.longest_sequence
