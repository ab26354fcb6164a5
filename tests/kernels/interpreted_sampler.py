"""Results of the sampler's Triton kernels, run by Triton's interpreter: a child of test_sampler_kernel.py.

The references are the torch operators of `sampler.choose`, which the default suite compares with `sampler.sample`, and
thresholds from sorted float64 numbers.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_worker.sampling import choose_kernel, sampler
from gpu_worker.sampling.choice import gumbel_noise, noise_keys
from gpu_worker.sampling.choose_kernel import choose_on_gpu
from gpu_worker.sampling.inputs import DrawInputs, late_samples
from gpu_worker.sampling.sampler import EditedLogits, choose, revise, sample
from tests.gpu_worker.sampling.test_dense import DENSE_ROWS, dense_inputs, on_device, ragged_inputs, varied
from tests.gpu_worker.sampling.test_dense import columns_of as host_columns_of
from tests.gpu_worker.sampling.test_sampler import ROWS
from tests.kernels.interpreter import mend_interpreter

CPU = torch.device("cpu")
NONE = (None,) * 7
mend_interpreter()


def columns_of(inputs: DrawInputs[Tensor]) -> tuple[Tensor, ...]:
    return tuple(getattr(inputs, name) for name in DrawInputs.__dataclass_fields__)


def logits_for(num_rows: int, vocab_size: int, seed: int = 1) -> Tensor:
    """Peaked and flat rows, every fourth with many ties, one of equal logits."""
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))
    logits *= torch.tensor([4.0, 1.0, 0.05]).repeat(num_rows)[:num_rows, None]
    logits[::4] = (logits[::4] * 4).round() / 4
    logits[min(5, num_rows - 1)] = 0.5
    return logits


def check(logits: Tensor, rows: list[dict[str, float]]) -> None:
    """Tokens and kept tokens are those of the torch operators."""
    inputs = dense_inputs(rows, CPU)
    tokens, floors = choose_on_gpu(logits, columns_of(inputs), None, False)
    expected, expected_floors = sampler._choose(logits, inputs)
    assert tokens.tolist() == expected.tolist()
    tempered = logits.float() / inputs.temperature.clamp(min=1e-5)[:, None]
    drawing = inputs.temperature > 0
    kept, wanted = tempered >= floors[:, None], tempered >= expected_floors[:, None]
    assert torch.equal(kept[drawing], wanted[drawing])
    assert torch.equal(choose_on_gpu(logits, NONE, None, False)[0], logits.float().argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 131, 3000])
def test_every_mix_of_rows(vocab_size: int, dtype: torch.dtype) -> None:
    rows = varied(DENSE_ROWS, 1)
    check(logits_for(len(rows), vocab_size).to(dtype), rows)


LARGE = [
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"top_p": 0.9},
    {"temperature": 0.8},
    {"top_k": 700, "min_p": 0.01},
    {"temperature": 0.0},
]


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(32_000, torch.float32), (50_257, torch.float16), (151_936, torch.bfloat16), (256_128, torch.bfloat16)],
)
def test_large_vocabularies(vocab_size: int, dtype: torch.dtype) -> None:
    rows = varied(LARGE, 2)
    check((2 * logits_for(len(rows), vocab_size, seed=3)).to(dtype), rows)


def kept_by_definition(logits: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """bool [V]: top-k, then top-p of what it leaves, from a stable sort and float64 sums; ties stand together."""
    order = np.argsort(-logits, kind="stable")
    ranked = logits[order][: top_k or None]
    shares = np.exp(ranked - ranked[0])
    before = np.cumsum(shares) - shares
    num_kept = max(1, int((before < top_p * shares.sum()).sum())) if top_p < 1 else ranked.size
    return logits >= ranked[num_kept - 1]


def test_thresholds_of_unusual_rows_are_those_of_a_sort() -> None:
    """Values around 0 and of both signs, subnormal ones, huge spans, few distinct values, equal rows, one outlier."""
    generator = np.random.default_rng(7)
    vocab_size, rows, logits = 1500, [], []
    makers: list[Callable[[], np.ndarray]] = [
        lambda: generator.normal(0, 1e-3, vocab_size),
        lambda: generator.normal(0, 1e-39, vocab_size),
        lambda: generator.normal(-30, 8, vocab_size),
        lambda: generator.choice([-1.0, -0.0, 0.0, 0.5, 2.0], vocab_size),
        lambda: generator.normal(0, 1, vocab_size) * 10.0 ** generator.integers(-3, 3, vocab_size),
        lambda: np.where(np.arange(vocab_size) == 1499, 80.0, generator.normal(0, 1, vocab_size)),
        lambda: np.full(vocab_size, -7.25),
    ]
    for i in range(42):
        top_k = int(generator.choice([0, 1, 2, 3, 40, 700, 1499]))
        top_p = float(np.float32(generator.choice([1.0, 0.999, 0.9, 0.5, 0.1, 1e-6])))
        rows.append({"top_k": top_k, "top_p": top_p, "position": i})
        logits.append(makers[i % len(makers)]().astype(np.float32))
    values = torch.from_numpy(np.stack(logits))
    _, floors = choose_on_gpu(values, columns_of(dense_inputs(rows, CPU)), None, False)
    kept = (values >= floors[:, None]).numpy()
    for i, row in enumerate(rows):
        wanted = kept_by_definition(logits[i].astype(np.float64), int(row["top_k"]), row["top_p"])
        assert np.array_equal(kept[i], wanted), (i, row, kept[i].sum(), wanted.sum())


def test_a_row_alone_chooses_what_it_chooses_among_others_and_in_other_strides() -> None:
    rows = varied(DENSE_ROWS[:8], 4)
    logits = logits_for(8, 2500).bfloat16()
    together = choose_on_gpu(logits, columns_of(dense_inputs(rows, CPU)), None, False)[0]
    order = [5, 0, 7, 2, 2]
    some = dense_inputs([rows[i] for i in order], CPU)
    assert torch.equal(choose_on_gpu(logits[order], columns_of(some), None, False)[0], together[order])
    for i in (3, 6):
        alone = dense_inputs([rows[i]], CPU)
        assert choose_on_gpu(logits[i : i + 1], columns_of(alone), None, False)[0] == together[i]
    wide = torch.full((16, 2600), math.nan, dtype=torch.bfloat16)
    wide[::2, 3:2503] = logits
    spaced = choose_on_gpu(wide[::2, 3:2503], columns_of(dense_inputs(rows, CPU)), None, False)[0]
    assert torch.equal(spaced, together)
    assert torch.equal(
        choose_on_gpu(wide.T[3:2503, ::2].T, columns_of(dense_inputs(rows, CPU)), None, False)[0], together
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_nonfinite_row_is_marked_and_affects_no_other(bad: float) -> None:
    rows = varied(DENSE_ROWS[:9], 5)
    logits = logits_for(9, 2100)
    inputs = columns_of(dense_inputs(rows, CPU))
    for columns in (NONE, inputs):
        expected = choose_on_gpu(logits, columns, None, False)[0]
        broken = logits.clone()
        broken[0, 2099] = broken[2, 5] = broken[7, 1100] = bad
        expected[[0, 2, 7]] = -1
        assert torch.equal(choose_on_gpu(broken, columns, None, False)[0], expected)


def test_of_equal_sums_of_logit_and_noise_the_lowest_token_is_chosen() -> None:
    """Logits so large that noise does not change them, in five blocks: the winner is in the first."""
    rows = varied([{}, {"top_p": 0.5}, {"min_p": 0.1}, {"temperature": 0.0}], 9)
    logits = torch.full((4, 5000), 1e9)
    logits[:, :100] = 0.0
    assert choose_on_gpu(logits, columns_of(dense_inputs(rows, CPU)), None, False)[0].tolist() == [100] * 4


def test_changed_logits_and_typical_p(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole step on the kernels: bans, a row with every token banned, typical_p with and without bans."""
    used: list[bool] = []

    def on_kernels(logits: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        *columns, at, may_ban = arguments
        used.append(may_ban)
        return choose_on_gpu(logits, tuple(columns), at, may_ban)

    rows = varied([*DENSE_ROWS[:7], *(row for row in ROWS if "typical_p" in row)], 6)
    logits = logits_for(len(rows), 2300, seed=8)
    logits[3, 1] = math.nan
    changed = torch.tensor([0, 1, 2, 3, 5, len(rows) - 1])
    scores = logits.index_select(0, changed) * 0.5
    scores[:, 1::2] = -math.inf
    scores[0, :1024] = -math.inf
    scores[1] = -math.inf
    drawing = [i for i, row in enumerate(rows) if row.get("temperature", 1.0) > 0]
    pairs = [(e, drawing.index(i)) for e, i in enumerate(changed.tolist()) if i in drawing]
    draws = torch.tensor([e for e, _ in pairs]), torch.tensor([r for _, r in pairs])
    edited = EditedLogits(samples=changed, draws=draws, logits=scores)
    expected = sample(logits, ragged_inputs(rows, CPU), edited)
    monkeypatch.setattr(sampler, "_operator", on_kernels)
    dense_ones, late = dense_inputs(rows, CPU), late_samples(host_columns_of(rows), np.arange(len(rows)))
    assert late is not None
    tokens = choose(logits, dense_ones)
    revise(tokens, logits, dense_ones, edited=edited, late=on_device(late, CPU))
    assert torch.equal(tokens, expected)
    assert used == [False, True, True, True]
    assert expected[1] == expected[3] == -1 and (expected[[0, 2, 4, 5]] >= 0).all()


@triton.jit
def _noise_of(keys, tokens, to, size: tl.constexpr):
    at = tl.arange(0, size)
    noise = choose_kernel._gumbel(tl.load(keys + at).to(tl.uint64), tl.load(tokens + at))
    tl.store(to + at, noise)


def test_noise_is_that_of_the_torch_operators() -> None:
    """Within rounding of the logarithms, also where the uniform number is nearest to 0 and to 1."""
    size = 1 << 16
    keys = noise_keys(torch.arange(size), torch.arange(size) % 7, torch.arange(size) * 3)
    tokens = (torch.arange(size) * 37 % 256_128).int()
    noise = torch.empty(size)
    _noise_of[(1,)](keys, tokens, noise, size)
    expected = gumbel_noise(keys, tokens.long())
    assert expected.min() < -2.2 and expected.max() > 9.5
    torch.testing.assert_close(noise, expected, rtol=3e-7, atol=3e-7)


class Operators(TorchDispatchMode):
    """Records the torch operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_choice_launches_two_kernels_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allocations launch nothing. The kernels do not run: the interpreter copies tensors by operators."""
    launched: list[str] = []

    class Counted:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *_, **__: launched.append(self._name)

    for name in ("summarise", "decide"):
        monkeypatch.setattr(choose_kernel, name, Counted(name))
    logits, inputs = logits_for(3, 50), columns_of(dense_inputs(varied(DENSE_ROWS[:3], 1), CPU))
    for columns in (NONE, inputs):
        launched.clear()
        with Operators() as operators:
            choose_on_gpu(logits, columns, None, False)
        assert launched == ["summarise", "decide"]
        assert operators.names <= {"empty", "empty_like"}, operators.names
