"""Computes tokens and logprobs from the logits of a step, on the device, and brings them to the host.

Every rank of a worker group computes all logits and draws with the same noise. Logits may still differ in the last bit,
and a token then, so the leader's tokens replace the others' before anything that the next step reads is written.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpu_worker.geometry import Geometry
from gpu_worker.layout.samples import SampleExtras, Samples
from gpu_worker.sampling.inputs import TokenLogprobs
from gpu_worker.sampling.logits import TokenHistory, edited, logprobs_of
from gpu_worker.sampling.sampler import EditedLogits, revise, sample
from gpu_worker.trees import leaves, mapped

# Overwrites tokens int64 [n] in place, in the stream of the step.
ShareTokens = Callable[[Tensor], None]


def keep_tokens(tokens: Tensor) -> None:
    """For a worker of one process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticOutput:
    """The results of the static part; a replay overwrites them."""

    # [samples + prompt tokens, vocabulary]; None if the step has no samples.
    logits: Tensor | None
    # int64 [samples]; -1 if a row's logits allow no token. On a CPU the greedy ones of steps of decode rows alone; None
    # for other steps there: their tokens are chosen afterwards.
    tokens: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """The results of a step, on the device or on their way to the host."""

    # int64 [samples, padding included]; -1 if a row's logits allow no token.
    tokens: Tensor
    logprobs: TokenLogprobs[Tensor] | None = None
    prompt_logprobs: TokenLogprobs[Tensor] | None = None
    # The buffer of a ResultRing in which the results are, or are going to be.
    buffer: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunStep:
    """A step with logits and without tokens, on the device. The next step overwrites it."""

    static: StaticOutput
    samples: Samples[Tensor]
    extras: SampleExtras[Tensor] | None


class ResultRing:
    """Pinned host memory for results, because its allocation may wait for the device.

    A buffer is taken when a plan is submitted and returned when its outcome is collected, that is after the copy has
    ended and the host has read it. There are as many buffers as plans in flight and one more; others are allocated if
    these do not suffice. They hold the tokens of every row, and become larger with the first larger results.
    """

    def __init__(self, *, num_buffers: int, num_tokens: int, allocate: Callable[[int], Tensor]) -> None:
        """allocate: returns int64 [n], in pinned memory if a device copies to it."""
        self._num_buffers, self._allocate = num_buffers, allocate
        self._num_words = 0
        self._free: list[Tensor] = []
        self._enlarge(num_tokens)

    def to_host(self, output: StepOutput) -> StepOutput:
        """Starts the copies to a buffer, which are valid after the current stream has executed them."""
        tensors = leaves(output)
        # In 8-byte words, so that each begins aligned.
        sizes = [-(-tensor.nbytes // 8) for tensor in tensors]
        if sum(sizes) > self._num_words:
            self._enlarge(sum(sizes))
        buffer = self._free.pop() if self._free else self._allocate(self._num_words)
        if len(tensors) == 1:
            # Tokens only, which is the usual result.
            tokens = buffer[: sizes[0]]
            tokens.copy_(output.tokens, non_blocking=True)
            return StepOutput(tokens=tokens, buffer=buffer)
        parts = iter(buffer[: sum(sizes)].split(sizes))
        copied: StepOutput = mapped(output, lambda tensor: _copied(tensor, next(parts)))
        return replace(copied, buffer=buffer)

    def put_back(self, output: StepOutput) -> None:
        """Returns the buffer of collected results, whose tensors are invalid from now on."""
        if output.buffer is not None and output.buffer.numel() == self._num_words:
            self._free.append(output.buffer)

    def _enlarge(self, num_words: int) -> None:
        """Replaces the free buffers. Those in use are dropped when they come back."""
        self._num_words = max(1, 1 << (num_words - 1).bit_length())
        self._free = [self._allocate(self._num_words) for _ in range(self._num_buffers)]


def _copied(tensor: Tensor, words: Tensor) -> Tensor:
    host = words.view(tensor.dtype)[: tensor.numel()].view(tensor.shape)
    return host.copy_(tensor, non_blocking=True)


class DeviceSampler:
    """Keeps the token history, the only state of sampling on the device between steps."""

    def __init__(self, geometry: Geometry, device: torch.device, *, is_padded: bool) -> None:
        """is_padded: whether the static part chooses by all that a row may ask for but its extras, or greedily."""
        self._history, self._is_padded = TokenHistory(geometry, device), is_padded
        self.share_tokens: ShareTokens = keep_tokens

    def finish(
        self,
        static: StaticOutput,
        samples: Samples[Tensor],
        extras: SampleExtras[Tensor] | None,
        masks: Tensor | None = None,
    ) -> StepOutput:
        """Chooses the tokens that the static part did not choose, and computes logprobs. Does not wait for the device.

        Requires that the step has samples. masks: of its rows with constraints, as for `edited`.
        """
        assert static.logits is not None
        num_samples = samples.rows.shape[0]
        own = static.logits[:num_samples]
        if extras is None:
            if self._is_padded and static.tokens is not None:
                # Shared already. The next step overwrites them, and a ResultRing copies them before.
                return StepOutput(tokens=static.tokens)
            tokens = sample(own, None) if static.tokens is None else static.tokens.clone()
            self.share_tokens(tokens)
            return StepOutput(tokens=tokens)
        tokens = self._chosen(own, static.tokens if self._is_padded else None, samples, extras, masks)
        logprobs = prompt_logprobs = None
        if (wanted := extras.with_logprobs) is not None:
            logprobs = logprobs_of(own, tokens.index_select(0, wanted).clamp(min=0), extras.top_k, rows=wanted)
        if extras.prompt is not None:
            prompt_logprobs = logprobs_of(static.logits[num_samples:], extras.prompt.targets, extras.prompt.top_k)
        return StepOutput(tokens=tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    def _chosen(
        self,
        logits: Tensor,
        chosen: Tensor | None,
        samples: Samples[Tensor],
        extras: SampleExtras[Tensor],
        masks: Tensor | None,
    ) -> Tensor:
        """Returns the tokens of all samples; `chosen` are those of the static part, if it chose some."""
        edits, changed = extras.edits, None
        penalties = None if edits is None else edits.penalties
        if edits is not None:
            if penalties is not None and penalties.missing is not None:
                self._history.write(*penalties.missing)
            changed = EditedLogits(
                samples=edits.samples, draws=edits.draws, logits=edited(logits, edits, self._history, masks)
            )
        if chosen is None:
            tokens = sample(logits, extras.drawing, changed)
        else:
            tokens = chosen
            revise(tokens, logits, samples.drawing, edited=changed, typical_samples=extras.typical)
        self.share_tokens(tokens)
        if penalties is not None and penalties.sampled is not None:
            places, sampled = penalties.sampled
            self._history.write(places, tokens.index_select(0, sampled).clamp(min=0))
        return tokens
