"""What the models' attention kernels take of each card, compiled at the sizes that the worker chooses for it."""

import difflib
from pathlib import Path

import pytest

from tests.kernels.cards import CARDS, KIB
from tests.kernels.table import Line, markdown

EXPECTED = Path(__file__).parent / "expected"
# Up to this dimension registers must suffice for a head.
NO_SPILLS_UP_TO = 256


def test_every_kernel_compiles_and_fits_shared_memory(card_key: str, resources: dict[str, list[Line]]) -> None:
    limit = CARDS[card_key].shared_per_block / KIB
    assert resources[card_key]
    too_large = [line for line in resources[card_key] if line["shared_kib"] > limit or line["blocks"] < 1]
    assert too_large == []


def test_no_kernel_spills_registers(card_key: str, resources: dict[str, list[Line]]) -> None:
    lines = [line for line in resources[card_key] if line["head_dim"] <= NO_SPILLS_UP_TO]
    assert lines
    assert [line for line in lines if line["spilled"] or line["stack"]] == []


def test_every_kernel_loads_asynchronously_and_uses_tensor_cores(
    card_key: str, resources: dict[str, list[Line]]
) -> None:
    slow = [line for line in resources[card_key] if line["products"] == "fma" or not line["copies"]]
    assert slow == []


def test_buckets_and_prompts_of_every_model_are_covered(card_key: str, resources: dict[str, list[Line]]) -> None:
    decode = {(line["model"], line["bucket"]) for line in resources[card_key] if line["call"] == "decode"}
    prefill = {line["model"] for line in resources[card_key] if line["call"] == "prefill"}
    models = {line["model"] for line in resources[card_key]}
    assert len(models) == len(prefill) == 4
    assert {(model, bucket) for model in models for bucket in (1, 2, 4, 8, 16, 32, 256)} <= decode


def test_the_table_is_the_committed_one(
    card_key: str, resources: dict[str, list[Line]], request: pytest.FixtureRequest
) -> None:
    path, found = EXPECTED / f"{card_key}.md", markdown(CARDS[card_key], resources[card_key])
    if request.config.getoption("--write"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(found)
        return
    changes = difflib.unified_diff(path.read_text().splitlines(), found.splitlines(), "committed", "found", lineterm="")
    difference = "\n".join(changes)
    if difference:
        pytest.fail(f"{path.name} differs; make test-kernels ARGS=--write writes it:\n{difference}", pytrace=False)
