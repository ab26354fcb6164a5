"""What a compiled decoder layer launches on an H200, counted from the code that Inductor writes for it."""

import json

import pytest

from tests.kernels.processes import run


@pytest.mark.parametrize(
    ("model", "most", "products"),
    [
        # Queries, keys and values; output; gate and up; down.
        ("Qwen3-0.6B", 20, 4),
        ("Gemma-2-2b", 25, 4),
    ],
)
def test_a_layer_launches_few_kernels(model: str, most: int, products: int) -> None:
    found = json.loads(run("tests.kernels.layer_launches", model))
    assert found["library"] == ["mm"] * products
    assert found["with_pool"] == [], "the compiled layer copies or reads the pool"
    around = len(found["kernels"]) + len(found["library"])
    for step in ("decode", "mixed"):
        assert found[step]["write_kv"] == 1
        assert around + sum(found[step].values()) <= most, f"{found['kernels']}, {found[step]}"
    # A decode step places no queries and gathers no outputs.
    assert sum(found["decode"].values()) == 3
