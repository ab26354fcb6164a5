"""Owns the served model's tokenizer: text to ids, ids to text, and the size limit of a text.

Knows nothing of requests or streams. The `tokenizers` library is imported with the first tokenizer. Long texts are
processed in threads: the batch calls of `tokenizers` release the interpreter lock, the single calls do not (tried on
0.23.3: for 450,000 characters the event loop stood still for 240 ms with single calls and 1 ms with batch calls).
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.text.detokenize import Decode

Result = TypeVar("Result")

# About 1 ms of work.
INLINE_CHARS = 4096
INLINE_TOKENS = 4096
NUM_THREADS = 2
# Long texts that may wait for a thread; each may be as large as a gRPC message.
MAX_WAITING_TEXTS = 64


class Tokenizer:
    """A tokenizer and its bounds. Raises ValueError if `tokenizer_json` is not a tokenizer."""

    def __init__(self, tokenizer_json: bytes, *, vocab_size: int) -> None:
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer_json)
        except Exception as error:  # tokenizers raises bare Exception
            raise ValueError(f"it is not a tokenizer.json: {error}") from error
        # The front end refuses a prompt that is longer than the model allows; it never cuts one.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        longest = max(len(self._tokenizer.id_to_token(i) or "") for i in range(vocab_size))
        # A token stands for at most as many characters as its own string has (byte-level: as many bytes).
        self.max_chars_per_token = max(1, longest)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="text")
        self._num_waiting = 0

    def check_size(self, field: str, text: str, max_length: int) -> None:
        """Refuses a text that cannot fit into `max_length` tokens, before any work on it."""
        max_chars = max_length * self.max_chars_per_token
        if not text:
            raise status.invalid(field, f"{field} is empty; at least 1 character is needed")
        if len(text) > max_chars:
            raise status.invalid(field, f"{field} has {len(text)} characters; the limit is {max_chars}")

    async def encode(self, text: str) -> list[int]:
        """The text's token ids, including the special tokens that the tokenizer adds to a prompt."""
        if len(text) <= INLINE_CHARS:
            return self._encode(text)
        return await self._in_thread(partial(self._encode, text))

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The whole text of `token_ids`."""
        work = partial(self._decode, token_ids, skip_special_tokens)
        return work() if len(token_ids) <= INLINE_TOKENS else await self._in_thread(work)

    def decoder(self, *, skip_special_tokens: bool) -> Decode:
        """The decode function for a Detokenizer, which decodes a few tokens at a time."""
        return partial(self._tokenizer.decode, skip_special_tokens=skip_special_tokens)

    def close(self) -> None:
        """Takes no more long texts. Those already in a thread are completed."""
        self._threads.shutdown(wait=False)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode_batch_fast([text])[0].ids

    def _decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._tokenizer.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0]

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        if self._num_waiting >= MAX_WAITING_TEXTS:
            raise status.overloaded(
                f"{self._num_waiting} long texts wait for the tokenizer; the limit is {MAX_WAITING_TEXTS}"
            )
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._num_waiting -= 1
