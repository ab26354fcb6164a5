"""The census of groups finds plans that are right, and one that is wrong without an error."""

from importlib.metadata import version

import pytest

from gpu_worker.sharding.plan import proven
from tests.census.groups import shared_by
from tests.rigs.processes import REPOSITORY

# Its workers are forked by a process that has imported the compiler, which takes seconds.
pytestmark = pytest.mark.together("compiler")

FAMILIES = [
    "deepseek_v3", "gemma2", "gemma3_text", "gpt_oss", "granite", "llama", "mistral", "mixtral", "olmo2", "phi3",
    "qwen2", "qwen3", "qwen3_moe",
]  # fmt: skip
# Their tiny experts, 48 wide, are too narrow for torch's grouped product on four ranks.
NARROW = {"deepseek_v3", "qwen3_moe"}


def test_two_ranks_equal_one_process() -> None:
    results = list(shared_by(["gpt_oss", "qwen3"], 2))
    assert [shared.result for shared in results] == ["equal", "equal"], results
    # Those of another version of Transformers are compared at the start of a group.
    pinned = (REPOSITORY / ".ci/constraints.txt").read_text().split()
    if f"transformers=={version('transformers')}" in pinned:
        assert {shared.plan for shared in results} <= set(proven().values())


@pytest.mark.long
@pytest.mark.parametrize(("size", "kv_heads"), [(2, 0), (2, 1), (4, 2), (4, 4)])
def test_ranks_equal_one_process(size: int, kv_heads: int) -> None:
    families = [name for name in FAMILIES if size == 2 or name not in NARROW]
    results = list(shared_by(families, size, kv_heads))
    assert len(results) == len(families)
    wrong = [shared for shared in results if not shared.result.startswith("equal")]
    assert not wrong, wrong


@pytest.mark.long
def test_a_plan_that_is_wrong_is_found() -> None:
    [shared] = shared_by(["gemma3n_text"], 2)
    # Its activations take the mean and the deviation of a dimension that the plan shards.
    assert shared.result == "wrong"
    assert shared.plan not in proven().values()
