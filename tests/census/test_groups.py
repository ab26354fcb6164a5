"""The census of groups finds a plan that is right, and one that is wrong without an error."""

from gpu_worker.sharding.proven import proven
from tests.census.groups import shared_by


def test_two_ranks_equal_one_process_and_a_wrong_plan_is_found() -> None:
    results = {shared.model_type: shared for shared in shared_by(["gemma3n_text", "qwen3"], 2)}
    assert results["qwen3"].result == "equal"
    assert results["qwen3"].plan == proven()["qwen3"]
    # Its activations take the mean and the deviation of a dimension that the plan shards.
    assert results["gemma3n_text"].result == "wrong"
    assert results["gemma3n_text"].plan not in proven().values()
