"""The results of a step, and how tokens and logprobs are computed from its logits, on the device.

Every rank of a worker group computes all logits and draws with the same noise. Logits may still differ in the last bit,
and a token then, so the leader's tokens replace the others' before anything that the next step reads is written.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from gpu_worker.layout.samples import SampleExtras, Samples
from gpu_worker.sampling.inputs import TokenLogprobs
from gpu_worker.sampling.logits import TokenHistory, edited, logprobs_of
from gpu_worker.sampling.sampler import EditedLogits

# Overwrites tokens int64 [n] in place, in the stream of the step.
ShareTokens = Callable[[Tensor], None]


def keep_tokens(tokens: Tensor) -> None:
    """For a worker of one process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticOutput:
    """What a step has computed before its masks and edits count; the next step overwrites it."""

    # [samples + prompt tokens, vocabulary]; None if the step has no samples.
    logits: Tensor | None
    # int64 [samples]; -1 if a row's logits allow no token. None: tokens are chosen afterwards.
    tokens: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """The results of a step, on the device or on their way to the host."""

    # int64 [samples, padding included]; -1 if a row's logits allow no token.
    tokens: Tensor
    logprobs: TokenLogprobs[Tensor] | None = None
    prompt_logprobs: TokenLogprobs[Tensor] | None = None
    # The buffer in which the results are, or are going to be, if it is to be put back.
    buffer: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunStep:
    """A step with logits and without tokens, on the device. The next step overwrites it."""

    static: StaticOutput
    samples: Samples[Tensor]
    extras: SampleExtras[Tensor] | None


# Returns the tokens int64 [samples] of logits [samples, vocabulary], of which some were edited.
Choose = Callable[[BegunStep, Tensor, EditedLogits | None], Tensor]


def output_of(
    begun: BegunStep, masks: Tensor | None, history: TokenHistory, choose: Choose, share: ShareTokens
) -> StepOutput:
    """Returns the tokens of a step that has samples, with logprobs. Does not wait for the device.

    masks: of its rows with constraints, as for `edited`. history: the only state of sampling between steps.
    """
    samples, extras, logits = begun.samples, begun.extras, begun.static.logits
    assert logits is not None
    num_samples = samples.rows.shape[0]
    of_samples = logits[:num_samples]
    if extras is None:
        tokens = choose(begun, of_samples, None)
        share(tokens)
        return StepOutput(tokens=tokens)
    edits, changed = extras.edits, None
    penalties = None if edits is None else edits.penalties
    if edits is not None:
        if penalties is not None and penalties.missing is not None:
            history.write(*penalties.missing)
        changed = EditedLogits(
            samples=edits.samples, draws=edits.draws, logits=edited(of_samples, edits, history, masks)
        )
    tokens = choose(begun, of_samples, changed)
    share(tokens)
    if penalties is not None and penalties.sampled is not None:
        places, sampled = penalties.sampled
        history.write(places, tokens.index_select(0, sampled).clamp(min=0))
    logprobs = prompt_logprobs = None
    if (wanted := extras.with_logprobs) is not None:
        logprobs = logprobs_of(of_samples, tokens.index_select(0, wanted).clamp(min=0), extras.top_k, rows=wanted)
    if extras.prompt is not None:
        prompt_logprobs = logprobs_of(logits[num_samples:], extras.prompt.targets, extras.prompt.top_k)
    return StepOutput(tokens=tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
