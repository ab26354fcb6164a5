"""The benchmark of linear layers runs, and its sums and bars are right; times are not tested."""

from dataclasses import replace

import pytest
import torch

from gpu_worker.checkpoint.linear import linear_kernel
from tests.measure import limits, linears
from tests.measure.linears import Figures, bars, steps

ONE = Figures(
    dtype="float32", threads=1, in_features=512, out_features=512, layers=8, rows=4,
    native_us=50, onednn_us=80, torch_us=100, limit_us=45,
)  # fmt: skip


def test_a_step_is_the_sum_of_the_models_layers() -> None:
    found = [ONE, replace(ONE, out_features=8192, layers=1, native_us=800), replace(ONE, in_features=2048)]
    (step,) = steps(found)
    assert (step.native_us, step.onednn_us, step.limit_us) == (8 * 50 + 800, 9 * 80, 9 * 45)
    assert step.out_features == 8 * 512 * 512 + 512 * 8192
    assert ONE.gflops(2.0) == pytest.approx(2 * 4 * 512 * 512 / 2e-6 / 1e9)


def test_the_bars() -> None:
    assert all(bar.is_met for bar in bars(ONE))
    assert [bar.value for bar in bars(replace(ONE, limit_us=42)) if not bar.is_met] == [0.84]
    assert all(bar.is_met for bar in bars(replace(ONE, limit_us=42, rows=32)))
    assert [bar.value for bar in bars(replace(ONE, onednn_us=47)) if not bar.is_met] == [0.94]


@pytest.mark.skipif(linear_kernel(torch.float32) is None, reason="the C++ kernels are not built here")
def test_every_engine_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = linear_kernel(torch.float32)
    assert kernel is not None
    weight, x = torch.randn(70, 40), torch.randn(3, 40)
    # Less than the caches have, which would only change times.
    monkeypatch.setattr(linears, "_COPIES_BYTES", 1 << 20)
    monkeypatch.setattr(limits, "_READ_BYTES", 1 << 20)
    results = [call(x, 1) for call in linears.engines(kernel, weight, 2).values()]
    assert all(torch.allclose(y, results[0], atol=1e-5) for y in results)  # type: ignore[arg-type]
    assert limits.read_bandwidth(1) > 1e8 and limits.multiply_rate(torch.float32, 1) > 1e8
    monkeypatch.setattr(linears, "_ROUND_SECONDS", 0.0)
    found = list(linears.measure(torch.float32, 1, {(40, 70): 2}, [1, 3], 1))
    assert [(each.rows, each.layers) for each in found] == [(1, 2), (3, 2)]
    assert all(each.native_us > 0 < each.limit_us for each in found)
