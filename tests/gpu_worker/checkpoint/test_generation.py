"""generation_config.json and config.json with values that are out of range, of other types, or not JSON's."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from tandem.internal.v1 import worker_pb2 as pb
from transformers import AutoConfig

from gpu_worker.checkpoint.files import ModelRefused, read_files
from gpu_worker.checkpoint.folder import read_json
from gpu_worker.checkpoint.generation import generation_of, read_generation
from gpu_worker.compatibility.check_model import default_length, length_limit
from gpu_worker.geometry import MAX_LENGTH
from tests.gpu_worker.saved_model import changed

HOSTILE: list[Any] = [
    None, True, False, 0, 1, -1, 0.5, 2.0, -0.5, 1.1, 200, 5e9, 2**31, 2**63, 10**400, math.inf, -math.inf, math.nan,
    "", "0.7", "all", "auto", [], [None], [2, None], [[2]], ["x"], {}, {"value": 1},
]  # fmt: skip
SETTINGS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "do_sample", "eos_token_id")
# As the front end checks requests that leave a setting out.
SERVED = {
    "temperature": (0, 100), "top_p": (1e-9, 1), "top_k": (0, 2**32 - 1), "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
}  # fmt: skip
PATH = Path("m/generation_config.json")
GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
DRAWN = GREEDY | {"temperature": 1.0}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_value_gives_a_default_that_is_served_or_a_refusal_with_file_field_and_value(name: str) -> None:
    refusals = list[str]()
    for value in HOSTILE:
        try:
            found = generation_of({"do_sample": True, name: value}, PATH)
        except ModelRefused as refused:
            refusals.append(str(refused))
            continue
        for setting, (low, high) in SERVED.items():
            assert low <= found.defaults[setting] <= high, (name, value)
        pb.Join(defaults=pb.GenerationDefaults(**found.defaults))
        assert all(type(token) is int for token in found.eos_token_ids or ())
    assert refusals
    assert [line for line in refusals if not line.startswith(f"{name} in {PATH} ") or "it must be" not in line] == []


@pytest.mark.parametrize(
    ("given", "defaults", "note"),
    [
        ({"top_k": -1}, DRAWN, "top_k in .* is -1; it is taken as 0, every token"),
        ({"top_k": 5e9}, DRAWN, "top_k in .* is 5000000000; it is taken as 0"),
        ({"top_k": 50.0}, DRAWN | {"top_k": 50}, ""),
        ({"top_p": 1.1}, DRAWN, "top_p in .* is 1.1; it is taken as 1, every token"),
        ({"top_p": 0, "temperature": 0.7}, GREEDY, "top_p in .* is 0, the likeliest token alone"),
        ({"temperature": None, "top_p": None, "top_k": None, "min_p": None}, DRAWN, ""),
        # What greedy decoding does not use is not judged.
        ({"do_sample": False, "temperature": -3, "top_p": 7, "top_k": "x", "min_p": []}, GREEDY, ""),
    ],
)
def test_values_with_a_plain_meaning_are_brought_into_range(
    given: dict[str, Any], defaults: dict[str, float], note: str
) -> None:
    found = generation_of({"do_sample": True} | given, PATH)
    assert found.defaults == defaults
    assert [bool(re.match(note, line)) for line in found.notes] == [True] * bool(note)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": 200}, "temperature in m/generation_config.json is 200; it must be 0 to 100: correct the file"),
        ({"top_p": -0.5}, "top_p in m/generation_config.json is -0.5; it must be 0 to 1: correct the file"),
        ({"top_k": -2}, "top_k in .* is -2; it must be at least 1, or 0 or -1 for every token"),
        ({"repetition_penalty": 0}, "repetition_penalty in .* is 0; it must be 0.01 to 100"),
        ({"temperature": "0.7"}, "temperature in .* is '0.7'; it must be a number"),
        ({"temperature": math.nan}, "temperature in .* is nan; it must be finite"),
        ({"eos_token_id": "</s>"}, "eos_token_id in .* is '</s>'; it must be a number"),
        ({"eos_token_id": list(range(1025))}, "eos_token_id in .* has 1025 ids; the limit is 1024"),
    ],
)
def test_a_refusal_names_file_field_value_and_limit(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelRefused, match=message):
        generation_of({"do_sample": True} | given, PATH)


def test_null_among_stop_ids_is_left_out_in_either_file(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = changed(saved, tmp_path / "m", eos_token_id=[2, None])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, None, 3]}))
    assert read_files(folder).eos_token_ids == (3,)
    assert "null is not a token" in read_generation(folder).notes[0]
    (folder / "generation_config.json").unlink()
    caplog.clear()
    assert read_files(folder).eos_token_ids == (2,)
    assert "config.json is [2, None]; null is not a token" in caplog.text


@pytest.mark.parametrize("empty", [None, [], [None]])
def test_a_file_without_a_stop_id_leaves_it_to_the_next(saved: Path, tmp_path: Path, empty: Any) -> None:
    folder = changed(saved, tmp_path / "m", eos_token_id=2)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": empty}))
    assert read_files(folder).eos_token_ids == (2,)


CONFIG_FIELDS = (
    "vocab_size", "eos_token_id", "max_position_embeddings", "model_type", "dtype", "torch_dtype", "text_config",
    "quantization_config", "auto_map", "rope_parameters", "rope_scaling", "head_dim", "architectures",
    "tie_word_embeddings", "hidden_act", "layer_types", "transformers_version",
)  # fmt: skip


@pytest.mark.parametrize("field", CONFIG_FIELDS)
def test_every_value_in_config_is_read_or_refused_with_the_file(folder: Path, field: str) -> None:
    settings = read_json(folder / "config.json")
    refusals = list[str]()
    for value in HOSTILE:
        (folder / "config.json").write_text(json.dumps(settings | {field: value}))
        try:
            files = read_files(folder)
        except ModelRefused as refused:
            refusals.append(str(refused))
        else:
            assert 1 <= files.config.get_text_config().vocab_size <= 1 << 24
    assert [line for line in refusals if "config.json" not in line] == []


@pytest.mark.parametrize("factor", [math.inf, math.nan, 0, "4", None, [], 1e300])
def test_a_length_that_no_service_takes_is_bounded_or_refused(saved: Path, tmp_path: Path, factor: Any) -> None:
    config = read_files(changed(saved, tmp_path / "long", max_position_embeddings=1 << 60)).config
    assert (default_length(config), length_limit(config)) == (MAX_LENGTH, MAX_LENGTH)
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": factor}
    if factor in (math.inf, 1e300):
        assert length_limit(config) == MAX_LENGTH
    else:
        with pytest.raises(ModelRefused, match=r"the factor of rope_parameters is .*; it must be a number, at least 1"):
            length_limit(config)


@pytest.mark.parametrize("wrong", [math.nan, 0.5, "4"])
def test_of_several_factors_the_wrong_one_is_named(saved: Path, wrong: Any) -> None:
    """Models with two kinds of attention have rotary tables of each."""
    config = read_files(saved).config
    tables = {"full_attention": 4.0, "sliding_attention": wrong}
    config.rope_parameters = {
        kind: {"rope_type": "dynamic", "rope_theta": 1e4, "factor": factor} for kind, factor in tables.items()
    }
    with pytest.raises(ModelRefused, match=rf"^the factor of rope_parameters is {wrong!r}; it must be a number"):
        length_limit(config)


@pytest.mark.parametrize("dtype", [{"dtype": "auto"}, {"torch_dtype": "auto", "dtype": None}, {"dtype": "float3"}])
def test_the_dtype_of_config_is_not_read(saved: Path, tmp_path: Path, dtype: dict[str, Any]) -> None:
    """The worker's setting decides."""
    folder = changed(saved, tmp_path / "m", **dtype)
    ignored = {"dtype": None, "_name_or_path": ""}
    expected = AutoConfig.from_pretrained(saved).to_dict() | ignored
    assert read_files(folder).config.to_dict() | ignored == expected
