"""One model through the worker: prefill, chunks, decode and mixed steps, every position against the reference.

Owns the steps of a trial and the recording of what the runner computes. Knows nothing of families.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from tandem.internal.v1 import worker_pb2 as pb
from torch import Tensor
from transformers import PreTrainedModel

from gpu_worker.geometry import Geometry
from gpu_worker.step.runner import Runner
from tests.census.reference import Reference, decoder_of, errors_by_position, relative_error
from tests.census.shrink import LAST_SPECIAL_TOKEN, PAD_TOKEN
from tests.gpu_worker.plans import TinyCore, geometry_of
from tests.gpu_worker.rig import num_decode_tokens

# Our relative error may be this many times eager's, both against float64, plus what rounding alone may do.
_RATIO = 4.0
_FLOOR = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# The mean would hide one wrong position among a hundred.
_WORST_RATIO = 12.0
# At positions that a near tie decides: times the error of eager attention with the other choice.
_TIE_RATIO = 2.0
# The share of such positions, or one; with more, the tiny model measures little.
_MOST_TIES = 0.1
# With a larger error eager attention is not a usable reference.
_MAX_NOISE = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 3e-1}
# Row: tokens of its prompt.
PROMPTS = {1: 45, 2: 70, 3: 33}
# Chunks {row: tokens} and decode rows of each step: chunks that end inside pages, prompts of two rows in one step,
# decode beside chunks, a whole prompt at once, decode alone.
STEPS: tuple[tuple[dict[int, int], list[int]], ...] = (
    ({1: 30}, []),
    ({1: 15, 2: 20}, []),
    ({2: 50}, [1]),
    ({3: 33}, [1, 2]),
    *(({}, [1, 2, 3]),) * 4,
)


class Mismatch(AssertionError):
    """The worker's results differ from those of eager attention."""


@dataclass(slots=True)
class Recorder:
    """A hook that sees the packed hidden states of each step."""

    hidden: Tensor | None = None

    @contextmanager
    def watching(self, model: PreTrainedModel) -> Iterator[None]:
        """Within it, every forward of `model` is recorded."""
        handle = decoder_of(model).register_forward_hook(self._see_hidden)
        yield
        handle.remove()

    def _see_hidden(self, module: object, args: object, output: tuple[Tensor, ...]) -> None:
        self.hidden = output[0].reshape(-1, output[0].shape[-1])


@dataclass(slots=True)
class Computed:
    """Hidden states of each row by position, and logits by the position that they follow."""

    hidden: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    logits: dict[int, dict[int, Tensor]] = field(default_factory=dict)


def geometry_for(max_length: int) -> Geometry:
    """Small enough for any machine; windows of the tiny configs begin and end inside pages."""
    vocab_size = LAST_SPECIAL_TOKEN + 1
    sizes = {"max_length": max_length, "token_budget": 128, "chunk_align": 32, "vocab_size": vocab_size}
    return geometry_of(num_pages=26, max_rows=3, **sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The largest ratio of an error to what is allowed, and the positions that near ties decide (`sensitivity`)."""

    ratio: float
    near_ties: int = 0
    # Captured decode steps of a CPU that were compared with ordinary ones.
    replays: int = 0


def run_trial(model: PreTrainedModel, runner: Runner, reference: Reference) -> Verdict:
    """The verdict over all rows. Raises Mismatch."""
    recorder = Recorder()
    core = TinyCore(runner.geometry)
    generator = np.random.default_rng(3)
    for row, length in PROMPTS.items():
        core.add(row, generator.integers(PAD_TOKEN + 1, LAST_SPECIAL_TOKEN, length).tolist())
    computed = Computed()
    with recorder.watching(model):
        for chunks, decode in STEPS:
            _step(core, runner, recorder, computed, chunks, decode)
    found = [_judge(core, computed, row, reference, model.dtype) for row in PROMPTS]
    return Verdict(ratio=max(each.ratio for each in found), near_ties=sum(each.near_ties for each in found))


def _step(
    core: TinyCore, runner: Runner, recorder: Recorder, computed: Computed, chunks: dict[int, int], decode: list[int]
) -> None:
    before = {row: core.rows[row].position for row in (*decode, *chunks)}
    recorder.hidden = None
    runner.submit(core.plan(chunks=chunks, decode=decode))
    outcome = runner.collect()
    assert outcome is not None
    if outcome.status != pb.STEP_STATUS_OK or outcome.nonfinite.size:
        raise Mismatch(f"step {core.step} ended {outcome.status}: {outcome.detail or 'non-finite logits'}")
    core.learn(outcome.tokens)
    assert recorder.hidden is not None
    for i, row in enumerate(decode):
        computed.hidden.setdefault(row, {})[before[row]] = recorder.hidden[i].double().cpu()
    at = num_decode_tokens(runner, len(decode), list(chunks.values()))
    for row, count in chunks.items():
        for offset in range(count):
            computed.hidden.setdefault(row, {})[before[row] + offset] = recorder.hidden[at].double().cpu()
            at += 1
    for i, row in enumerate(core.sampled):
        logits = runner.on_device.last_logits
        assert logits is not None
        last = core.rows[row].position - 1
        computed.logits.setdefault(row, {})[last] = logits[i].double().cpu()


def _judge(core: TinyCore, computed: Computed, row: int, reference: Reference, dtype: torch.dtype) -> Verdict:
    hidden = computed.hidden[row]
    assert sorted(hidden) == list(range(len(hidden)))
    tokens = core.rows[row].tokens[: len(hidden)]
    truth, noise = reference.truth(tokens)
    if not noise <= _MAX_NOISE[dtype]:
        raise Mismatch(f"eager attention itself errs by {noise:.2g}; the tiny model measures nothing")
    allowed = _RATIO * noise + _FLOOR[dtype]
    last = sorted(computed.logits[row])
    pairs = {
        "hidden states": (torch.stack([hidden[i] for i in range(len(hidden))]), truth.hidden),
        "logits": (torch.stack([computed.logits[row][i] for i in last]), truth.logits[last]),
    }
    found: list[Verdict] = []
    for name, (ours, exact) in pairs.items():
        try:
            found.append(errors_within(f"{name} of row {row}", ours, exact, allowed))
        except Mismatch:
            sensitive = reference.sensitivity(tokens, truth)
            of_eager = sensitive.hidden if name == "hidden states" else sensitive.logits[last]
            found.append(errors_within(f"{name} of row {row}", ours, exact, allowed, of_eager))
    return Verdict(ratio=max(each.ratio for each in found), near_ties=max(each.near_ties for each in found))


def errors_within(name: str, ours: Tensor, exact: Tensor, allowed: float, sensitivity: Tensor | None = None) -> Verdict:
    """Raises Mismatch if `ours` errs by more than is allowed, over all positions or at one.

    sensitivity: eager attention's own errors by position if it errs by one rounding more. Positions where these exceed
    `allowed` are judged by them.
    """
    by_position = errors_by_position(ours, exact)
    ties = torch.zeros(len(ours), dtype=torch.bool) if sensitivity is None else sensitivity > allowed
    if int(ties.sum()) > max(1, _MOST_TIES * len(ties)):
        raise Mismatch(f"{name}: rounding alone decides {int(ties.sum())} of {len(ties)} positions")
    error = relative_error(ours[~ties], exact[~ties])
    limits = torch.full_like(by_position, _WORST_RATIO * allowed)
    if sensitivity is not None:
        limits[ties] = _TIE_RATIO * sensitivity[ties]
    if not (error <= allowed and bool((by_position <= limits).all())):
        place = int((by_position / limits).argmax())
        raise Mismatch(
            f"{name} err by {error:.2g}, at most by {float(by_position[place]):.2g} (entry {place}); "
            f"{allowed:.2g} is allowed, {float(limits[place]):.2g} at this entry"
        )
    return Verdict(ratio=error / allowed, near_ties=int(ties.sum()))
