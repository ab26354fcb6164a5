"""The served model as front ends see it: sizes from the core, the tokenizer from a worker's Join.

Owns the tokenizer, the files of chats and the root of page hashes. All workers of one core have the same identity,
which includes these files, so they are taken once, from the first worker that is proven. Joins of workers on probation
are kept until then. Sizes and defaults come from the core with each ModelServed.
"""

from collections.abc import Collection
from dataclasses import asdict

from tandem.internal.v1 import frontend_pb2, worker_pb2
from tandem.v1 import control_pb2, inference_pb2

from scheduler_svc.core.messages.config import MAX_LOGPROBS, MAX_NUM_SAMPLES
from scheduler_svc.core.messages.effects import ModelServed
from scheduler_svc.wire.arrays import fields

# The fields that callers see as the worker reported them.
_SAME = (
    *("model", "identity", "vocab_size", "page_size", "eos_token_ids", "window", "sink_tokens"),
    *("max_length", "max_rows", "token_budget"),
)


class ServedModel:
    """Has no tokenizer until a worker is proven."""

    def __init__(self, *, default_max_new_tokens: int, max_waiting: int, cache_root: bytes) -> None:
        """`cache_root`: 32 random bytes that only front ends receive and that are never logged."""
        self._default_max_new_tokens = default_max_new_tokens
        self._max_waiting = max_waiting
        self._cache_root = cache_root
        self._tokenizer_json: bytes | None = None
        self._chat_template = ""
        # A serialized ChatFiles.
        self._chat_files = b""
        # A tokenizer takes tens of MB, so Joins are kept only until the first worker is proven.
        self._on_probation: dict[str, worker_pb2.Join] = {}

    def joined(self, worker: str, join: worker_pb2.Join, workers: Collection[str]) -> None:
        """Keeps the Join of a worker that the core accepted; `workers` are all that have joined, this one included."""
        if self._tokenizer_json is not None:
            return
        self._on_probation = {name: kept for name, kept in self._on_probation.items() if name in workers}
        self._on_probation[worker] = join

    def proven(self, worker: str) -> None:
        """Takes the tokenizer of a worker that confirmed a step, if it is the first one."""
        join = self._on_probation.get(worker)
        if join is not None:
            self._tokenizer_json, self._chat_template = join.tokenizer_json, join.chat_template
            self._chat_files = join.chat.SerializeToString(deterministic=True)
            self._on_probation.clear()

    def state(self, effect: ModelServed) -> frontend_pb2.ModelState:
        """Returns the message for a front end."""
        served = effect.info
        if served is None:
            return frontend_pb2.ModelState(ready=False)
        assert self._tokenizer_json is not None, "a model is served before a worker is proven"
        info = control_pb2.GetModelInfoResponse(
            **fields(served, _SAME),
            num_pages=served.usable_pages,
            sampling_defaults=inference_pb2.SamplingParams(**asdict(served.defaults)),
            default_max_new_tokens=self._default_max_new_tokens,
            max_waiting=self._max_waiting,
            has_tokenizer=bool(self._tokenizer_json),
            max_num_samples=min(MAX_NUM_SAMPLES, self._max_waiting),
            max_logprobs=min(MAX_LOGPROBS, served.vocab_size),
        )
        return frontend_pb2.ModelState(
            ready=True,
            info=info,
            tokenizer_json=self._tokenizer_json,
            chat_template=self._chat_template,
            chat_files=self._chat_files,
            cache_root=self._cache_root,
            recent_max_length=effect.recent_max_length,
            constraint_refusal=effect.constraint_refusal,
        )
