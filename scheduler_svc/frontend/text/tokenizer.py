"""Owns the served model's tokenizer: text to ids, ids to text, the size limit of a text, and the threads of long texts.

Knows nothing of requests or streams. The `tokenizers` library is imported with the first tokenizer. Long texts are
processed in threads: the batch calls of `tokenizers` release the interpreter lock, the single calls do not (tried on
0.23.3: for 450,000 characters the event loop stood still for 240 ms with single calls and 1 ms with batch calls).
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from time import thread_time
from typing import TypeVar

from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.rpc.gate import Bound, Gate
from scheduler_svc.frontend.sizes import Sizes, wrong
from scheduler_svc.frontend.text.detokenize import MAX_CONTEXT_TOKENS, Decode, Pieces, TokenBytes, take_replacements
from tandem_contract.plural import numbered

Result = TypeVar("Result")

# About 1 ms of work.
INLINE_CHARS = 4096
INLINE_TOKENS = 4096
INLINE_EACH = 512
NUM_THREADS = 2
# Long texts that may wait for a thread, those of one tenant half of them; each may be as large as a gRPC message.
MAX_WAITING_TEXTS = 128
# Few texts have more characters per token, so a longer text is probably too long.
LIKELY_CHARS_PER_TOKEN = 8
# 10 to 60 ms of work.
SLICE_CHARS = 65_536
# Cuts between slices may add tokens, so slices are counted to a quarter above the limit.
SLICE_MARGIN = 1.25


class TextThreads:
    """Threads for long texts. The tenant that has used the least CPU time in them gets the next one."""

    def __init__(self, num_threads: int, max_waiting: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="text")
        waiting = Bound(most=max_waiting, thing="long text of the caller", state="wait")
        self.gate = Gate(Bound(most=num_threads, is_shared=False), waiting)

    async def run(self, tenant: str, work: Callable[[], Result]) -> Result:
        """Returns the result of the work. Raises Refusal if too much waits, no thread starts, or the model is gone."""
        used = list[float]()

        def timed() -> Result:
            begun = thread_time()
            try:
                return work()
            finally:
                used.append(thread_time() - begun)

        await self.gate.enter(tenant)
        try:
            running = asyncio.get_running_loop().run_in_executor(self._threads, timed)
        except RuntimeError as error:
            self.gate.leave(tenant)
            raise status.overloaded(f"a long text needs a thread: {error}") from None
        # If the caller leaves, the work goes on.
        running.add_done_callback(lambda _: self.gate.leave(tenant, sum(used)))
        return await asyncio.shield(running)

    def close(self) -> None:
        """Starts nothing more. What runs is completed, and what waits is refused."""
        self.gate.close(status.not_ready("the model is not served any more"))
        self._threads.shutdown(wait=False)


class Tokenizer:
    """A tokenizer and its bounds. Raises ValueError if `tokenizer_json` is not a tokenizer.

    `splits_special_tokens`: a text has no special tokens, even if it spells one.
    """

    def __init__(self, tokenizer_json: bytes, *, vocab_size: int, splits_special_tokens: bool = False) -> None:
        import tokenizers

        try:
            # For a copy; what changes it changes every text.
            self.backend = tokenizers.Tokenizer.from_buffer(tokenizer_json)
        except Exception as error:  # tokenizers raises bare Exception
            raise ValueError(f"it is not in the form of tokenizers: {error}") from error
        self.backend.encode_special_tokens = splits_special_tokens
        # Those of the whole text; what decodes a few tokens leaves them to its caller.
        self.replacements = take_replacements(self.backend)
        longest = max(len(self.backend.id_to_token(i) or "") for i in range(vocab_size))
        # A token stands for at most as many characters as its own string has (byte-level: as many bytes).
        self.max_chars_per_token = max(1, longest)
        # For long texts and for chats.
        self.threads = TextThreads(NUM_THREADS, MAX_WAITING_TEXTS)

    async def encode(self, text: str, tenant: str, *, add_special_tokens: bool = True) -> list[int]:
        """The text's token ids, including the special tokens that the tokenizer adds to a prompt, if these are wanted.

        A text that begins with the same special tokens itself has them once.
        """
        work = partial(self._encode, text, add_special_tokens)
        return work() if len(text) <= INLINE_CHARS else await self.threads.run(tenant, work)

    async def check(self, text: str, sizes: Sizes, tenant: str) -> None:
        """Refuses an empty text, and one that cannot fit into a sequence, before any work on it.

        A very long text is refused as soon as a part of it has clearly more tokens. The worst texts take 0.9 s per
        megabyte, so the whole of a long one is not worth it.
        """
        if not text:
            raise wrong("text", "is empty; at least 1 character is needed")
        if len(text) > sizes.text_chars:
            raise wrong("text", f"has {len(text)} characters; the limit is {sizes.text_chars}")
        if len(text) <= LIKELY_CHARS_PER_TOKEN * sizes.length:
            return
        num_tokens = 0
        for start in range(0, len(text), SLICE_CHARS):
            part = text[start : start + SLICE_CHARS]
            num_tokens += await self.threads.run(tenant, partial(self._count, part))
            if num_tokens > SLICE_MARGIN * sizes.length:
                end = start + len(part)
                which = "which" if end == len(text) else f"and the first {end}"
                about = "about " if start else ""
                many = f"{numbered(len(text), 'character')}, {which} are {about}{numbered(num_tokens, 'token')}"
                raise wrong("text", f"has {many}; the limit is {sizes.length}")

    async def decode(self, token_ids: Sequence[int], tenant: str, *, skip_special_tokens: bool) -> str:
        """The whole text of `token_ids`."""
        work = partial(self._decode, token_ids, skip_special_tokens)
        return work() if len(token_ids) <= INLINE_TOKENS else await self.threads.run(tenant, work)

    async def decode_each(self, token_ids: Sequence[int], tenant: str, *, skip_special_tokens: bool) -> list[str]:
        """What each of `token_ids` adds to their text."""
        work = partial(self._decode_each, token_ids, skip_special_tokens)
        return work() if len(token_ids) <= INLINE_EACH else await self.threads.run(tenant, work)

    def pieces(self, before: Sequence[int], *, skip_special_tokens: bool) -> Pieces:
        """Reads what the tokens that follow these add to the text."""
        decode = self.decoder(skip_special_tokens=skip_special_tokens)
        left_out = self.special_tokens if skip_special_tokens else dict[int, str]()
        return Pieces(decode, self.token_bytes, left_out, before[-MAX_CONTEXT_TOKENS:], self.replacements)

    def decoder(self, *, skip_special_tokens: bool) -> Decode:
        """The decode function for a Detokenizer, which decodes a few tokens at a time."""
        return partial(self.backend.decode, skip_special_tokens=skip_special_tokens)

    def decoder_without(self, token_ids: Set[int]) -> Decode:
        """A decode function that leaves out these tokens alone, and no other special tokens."""
        decode = self.decoder(skip_special_tokens=False)
        return lambda tokens: decode([token for token in tokens if token not in token_ids])

    @cached_property
    def token_bytes(self) -> TokenBytes:
        return TokenBytes(self.backend)

    @cached_property
    def special_tokens(self) -> Mapping[int, str]:
        added = self.backend.get_added_tokens_decoder()
        return {token_id: token.content for token_id, token in added.items() if token.special}

    @cached_property
    def _begin(self) -> list[int]:
        """The special tokens that the tokenizer adds before a text."""
        [whole], [bare] = (self.backend.encode_batch_fast(["a"], add_special_tokens=add) for add in (True, False))
        return whole.ids[: whole.ids.index(bare.ids[0])] if bare.ids and bare.ids[0] in whole.ids else []

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        num = len(self._begin) if add_special_tokens else 0
        return ids[num:] if ids[num : 2 * num] == self._begin else ids

    def _count(self, text: str) -> int:
        return len(self.backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def _decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        [text] = self.backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
        for old, new in self.replacements:
            text = text.replace(old, new)
        return text

    def _decode_each(self, token_ids: Sequence[int], skip_special_tokens: bool) -> list[str]:
        reader = self.pieces((), skip_special_tokens=skip_special_tokens)
        left_out = self.special_tokens.keys() if skip_special_tokens else frozenset[int]()
        texts = ["" if token_id in left_out else reader.push(token_id).text for token_id in token_ids]
        if texts:
            texts[-1] += reader.rest().text
        return texts
