"""What callers are told of the served model: a worker's Join, kept for front ends that come later.

Owns the last accepted Join and the root of page hashes. Workers of one core have one identity, so any Join tells the
same model; which sizes hold where workers differ is the core's to say. It knows only the part that it decides by.
"""

from tandem.internal.v1 import frontend_pb2, worker_pb2
from tandem.v1 import control_pb2, inference_pb2

from scheduler_svc.core.config import MAX_LOGPROBS, MAX_NUM_SAMPLES
from scheduler_svc.core.events import WorkerInfo


class ModelCard:
    """Empty until a worker was accepted."""

    def __init__(self, *, default_max_new_tokens: int, max_waiting: int, cache_root: bytes) -> None:
        """`cache_root`: 32 bytes that nobody outside can guess, for front ends alone, never logged."""
        self._default_max_new_tokens = default_max_new_tokens
        self._max_waiting = max_waiting
        self._cache_root = cache_root
        self._join: worker_pb2.Join | None = None

    def take(self, join: worker_pb2.Join) -> None:
        """A worker was accepted with this."""
        self._join = join

    def state(self, served: WorkerInfo) -> frontend_pb2.ModelState:
        """The message for a front end, with the sizes that the core goes by; only once a worker was accepted."""
        join = self._join
        assert join is not None
        info = control_pb2.GetModelInfoResponse(
            model=served.model,
            identity=served.identity,
            vocab_size=served.vocab_size,
            max_length=served.max_length,
            page_size=served.page_size,
            num_pages=served.usable_pages,
            max_rows=served.max_rows,
            token_budget=served.token_budget,
            eos_token_ids=served.eos_token_ids,
            sampling_defaults=inference_pb2.SamplingParams(
                temperature=join.defaults.temperature,
                top_p=join.defaults.top_p,
                top_k=join.defaults.top_k,
                min_p=join.defaults.min_p,
                repetition_penalty=join.defaults.repetition_penalty,
            ),
            default_max_new_tokens=self._default_max_new_tokens,
            max_waiting=self._max_waiting,
            has_tokenizer=bool(join.tokenizer_json),
            max_num_samples=min(MAX_NUM_SAMPLES, self._max_waiting),
            max_logprobs=min(MAX_LOGPROBS, served.vocab_size),
            window=served.window,
            sink_tokens=served.sink_tokens,
        )
        return frontend_pb2.ModelState(
            ready=True,
            info=info,
            tokenizer_json=join.tokenizer_json,
            chat_template=join.chat_template,
            cache_root=self._cache_root,
        )
