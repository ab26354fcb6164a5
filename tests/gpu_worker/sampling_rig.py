"""Sampling without a model: plans, row tables and the worker's sampling as in a step, with logits from a test.

Owns the oracle too: the probabilities that worker.proto promises, in float64 and plain loops, independent of the code
under test.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from gpu_worker.cpu.steps import sampled
from gpu_worker.cuda.shapes import Shapes
from gpu_worker.cuda.steps import revised
from gpu_worker.geometry import Geometry
from gpu_worker.layout.row_tables import Feature, RowTables
from gpu_worker.layout.samples import SampledRows, SampleExtras, Samples, lay_out_extras, write_samples
from gpu_worker.layout.step_layout import StepShape
from gpu_worker.sampling.logits import TokenHistory
from gpu_worker.sampling.sampler import choose
from gpu_worker.step.output import BegunStep, StaticOutput, StepOutput, keep_tokens, output_of
from gpu_worker.trees import mapped
from gpu_worker.wire.frames import read_plan
from tests.gpu_worker.plans import Sequence_, TinyCore
from tests.rigs.padded_shapes import placed_in, unpadded


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """The sampling parameters of one sequence."""

    sampling: Mapping[str, float] = field(default_factory=dict)
    biases: Mapping[int, float] = field(default_factory=dict)
    allowed: Sequence[int] = ()
    banned: Sequence[int] = ()
    # The tokens of the mask of a row with a constraint, at every position.
    mask: Sequence[int] = ()


class SamplingRig:
    """One worker's sampling; the test supplies the logits of (row, position of the next token)."""

    def __init__(
        self,
        *,
        vocab_size: int,
        max_rows: int,
        device: torch.device,
        max_length: int = 64,
        padded: bool | None = None,
    ) -> None:
        """padded: whether steps are padded, as captured steps are; by default as the device's are."""
        self.geometry = Geometry(
            page_size=64,
            num_pages=max_rows + 1 + max_rows * (max_length // 64),
            max_rows=max_rows,
            max_length=max_length,
            token_budget=64 * max_rows + 64,
            chunk_align=16,
            vocab_size=vocab_size,
        )
        self.device = device
        is_padded = device.type != "cpu" if padded is None else padded
        self._inputs_of = (
            placed_in(Shapes.of(self.geometry), self.geometry, ()) if is_padded else unpadded(self.geometry)
        )
        self._is_padded = is_padded
        self.core, self.tables = TinyCore(self.geometry), RowTables(self.geometry)
        self._history = TokenHistory(self.geometry, device)
        self._masks: dict[int, Sequence[int]] = {}

    def add(self, row: int, tokens: Sequence[int], wish: Wish, *, num_prompt: int = 0) -> Sequence_:
        self._masks[row] = wish.mask
        return self.core.add(
            row,
            tokens,
            banned=wish.banned,
            biases=wish.biases,
            allowed=wish.allowed,
            num_prompt=num_prompt,
            **wish.sampling,
        )

    def laid_out(self, **running: object) -> tuple[int, Samples[Tensor], SampleExtras[Tensor] | None]:
        """The samples of the next plan on the device, their number, and what is special about them."""
        message = self.core.plan(**running)
        started = np.frombuffer(message.started.rows, "<i4").tolist()
        if any(self._masks[row] for row in started):
            message.started.constraints = b"".join(bytes([bool(self._masks[row])]) * 32 for row in started)
        plan = read_plan(message, self.geometry)
        self.tables.apply(plan)
        self.tables.check(plan)
        sampled = SampledRows.of(plan, self.tables)
        need = StepShape(
            decode=plan.decode_rows.size,
            prefill=0,
            tokens=plan.decode_rows.size,
            samples=sampled.rows.size,
            draws=bool(sampled.any_use & Feature.DRAWS),
        )
        shape, inputs = self._inputs_of(need)
        samples = inputs.samples
        write_samples(samples, plan, sampled, self.tables, shape.decode)
        laid_out = samples, lay_out_extras(sampled, self.tables, samples)
        self.tables.advance(plan)
        return (
            need.samples,
            *(mapped(part, lambda array: torch.from_numpy(array).to(self.device)) for part in laid_out),
        )

    def step(self, logits_of: Callable[[int, int], Tensor], **running: object) -> StepOutput:
        """Runs one step; `logits_of` (row, position) are [V]. The core learns the tokens."""
        num_samples, samples, extras = self.laid_out(**running)
        # The token that the step samples counts as known already.
        rows = [logits_of(row, int(self.tables.num_tokens[row]) - 1) for row in samples.rows.tolist()[:num_samples]]
        rows += [torch.zeros_like(rows[0])] * (samples.rows.shape[0] - num_samples)
        logits = torch.stack(rows).to(self.device)
        tokens = choose(logits, samples.drawing) if self._is_padded else None
        begun = BegunStep(static=StaticOutput(logits=logits, tokens=tokens), samples=samples, extras=extras)
        output = self._output(begun, self.masks_of(samples, extras))
        self.core.learn(output.tokens.cpu()[:num_samples].tolist())
        return output

    def _output(self, begun: BegunStep, masks: Tensor | None) -> StepOutput:
        if self._is_padded and begun.extras is None:
            return StepOutput(tokens=begun.static.tokens)
        return output_of(begun, masks, self._history, revised if self._is_padded else sampled, keep_tokens)

    def masks_of(self, samples: Samples[Tensor], extras: SampleExtras[Tensor] | None) -> Tensor | None:
        """The masks of a step, as the worker uploads them."""
        edits = None if extras is None else extras.edits
        if edits is None or edits.masked is None:
            return None
        rows = samples.rows[edits.samples[edits.masked]].tolist()
        return torch.stack([_bits(self._masks[row], self.geometry.vocab_size) for row in rows]).to(self.device)


def _bits(tokens: Sequence[int], vocab_size: int) -> Tensor:
    """uint8 [bytes] as a mask server writes them: whole words of 32 bits, and none for tokens that do not exist."""
    bits = np.zeros(32 * -(-vocab_size // 32), np.uint8)
    bits[list(tokens)] = 1
    return torch.from_numpy(np.packbits(bits, bitorder="little"))


def logits_by_oracle(logits: Tensor, wish: Wish, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
    """float64 [V]: the input of temperature and filters, as worker.proto defines it."""
    get = wish.sampling.get
    scores = logits.double().cpu().numpy().copy()
    for token, bias in wish.biases.items():
        scores[token] += bias
    for token in {*prompt, *output}:
        penalty = get("repetition_penalty", 1.0)
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token, count in Counter(output).items():
        scores[token] -= get("frequency_penalty", 0.0) * count + get("presence_penalty", 0.0)
    for token in range(scores.size):
        if any(only and token not in only for only in (wish.allowed, wish.mask)):
            scores[token] = -np.inf
        if token in wish.banned and len(prompt) + len(output) < get("banned_until", 0):
            scores[token] = -np.inf
    return scores


def probabilities(scores: np.ndarray, wish: Wish) -> np.ndarray:
    """float64 [V] of drawing each token: temperature, top-k, top-p, min-p, typical-p in this order."""
    get = wish.sampling.get
    scores = scores / get("temperature", 1.0)
    order = np.argsort(-scores, kind="stable")
    if get("top_k", 0):
        scores[order[int(get("top_k", 0)) :]] = -np.inf
    shares = _softmax(scores)
    before = np.cumsum(shares[order]) - shares[order]
    if get("top_p", 1.0) < 1:
        scores[order[(before >= get("top_p", 1.0)) & (np.arange(order.size) > 0)]] = -np.inf
    shares = _softmax(scores)
    scores[shares < get("min_p", 0.0) * shares.max()] = -np.inf
    if get("typical_p", 1.0) < 1:
        scores[~_is_typical(_softmax(scores), get("typical_p", 1.0))] = -np.inf
    return _softmax(scores)


def _is_typical(shares: np.ndarray, typical_p: float) -> np.ndarray:
    """bool [V]: the tokens with information closest to the entropy, until they hold `typical_p`."""
    information = -np.log(np.maximum(shares, 1e-300))
    order = np.argsort(np.abs(information - (shares * information).sum()), kind="stable")
    num_kept = int((np.cumsum(shares[order]) < typical_p).sum()) + 1
    return np.isin(np.arange(shares.size), order[:num_kept])


def _softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def chi_square(counts: np.ndarray, exact: np.ndarray) -> float:
    """p-value of counts [V] of independent draws; rare tokens are merged. 0 if an impossible token was drawn."""
    if counts[exact == 0].sum():
        return 0.0
    expected = counts.sum() * exact
    rare = expected < 10
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = torch.tensor(((counts - expected) ** 2 / expected).sum())
    degrees = torch.tensor(float(expected.size - 1))
    return float(torch.special.gammaincc(degrees.double() / 2, statistic.double() / 2))
