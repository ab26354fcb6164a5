"""Tokens that stand only in tokenizer_config.json, through the whole service with a real worker: as AutoTokenizer's."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tandem_client import Client
from tests.rigs.tokenizer_folders import token
from tests.system.real_service import BUNDLED, SMALL_PAGES, TIMEOUT_SECONDS, real_service

# Its workers are forked by a process that has imported torch, which takes seconds.
pytestmark = pytest.mark.together("torch")

# The first ids of the bundled model that have no token.
WORD, SPECIAL, LEFT, NAMED = range(4102, 4106)
ADDED = {WORD: token("zanzibar"), SPECIAL: token("<note>", special=True), LEFT: token("[left]", lstrip=True)}
TEXT = "The zanzibar <note>animal   [left] <named>zanzibars"


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    client: Client
    # AutoTokenizer's.
    truth: Any


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    from transformers import AutoTokenizer

    folder: Path = shutil.copytree(BUNDLED / "model", tmp_path_factory.mktemp("model") / "m")
    path = folder / "tokenizer_config.json"
    known = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    listed = {str(each.pop("id")): each for each in known} | {str(idx): each for idx, each in ADDED.items()}
    added = {"added_tokens_decoder": listed, "extra_special_tokens": ["<named>"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | added))
    with real_service(num_pages=SMALL_PAGES, flags=("--model", str(folder))) as service:
        yield Served(client=service.client, truth=AutoTokenizer.from_pretrained(folder))


def generated(served: Served, prompt: str | None = "The", **options: Any) -> tuple[list[int], str, str]:
    """Ids, text and stop string of a greedy output of four tokens, unless the options say otherwise."""
    settings = {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True} | options
    stream = served.client.generate(prompt, timeout=TIMEOUT_SECONDS, **settings)
    deltas = list(stream)
    assert stream.finished is not None
    ids = [each for delta in deltas for each in delta.token_ids]
    return ids, "".join(delta.text for delta in deltas), stream.finished.stop_string


def test_prompts_and_texts_have_the_tokens(served: Served) -> None:
    ids = served.client.tokenize(TEXT)
    assert ids == served.truth(TEXT)["input_ids"]
    assert {WORD, SPECIAL, LEFT, NAMED} <= set(ids)
    for skip in (False, True):
        expected = served.truth.decode(ids, skip_special_tokens=skip)
        assert served.client.detokenize(ids, skip_special_tokens=skip) == expected
    stream = served.client.generate(TEXT, max_new_tokens=1, timeout=TIMEOUT_SECONDS)
    assert len(list(stream)) == 1 and stream.accepted is not None
    assert stream.accepted.prompt_tokens == len(ids)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("allowed", [[WORD], [SPECIAL], [NAMED], [WORD, SPECIAL, LEFT, NAMED]])
def test_outputs_have_the_tokens(served: Served, allowed: list[int], skip: bool) -> None:
    ids, text, _ = generated(served, allowed_token_ids=allowed, skip_special_tokens=skip)
    assert len(ids) == 4 and set(ids) <= set(allowed)
    assert text == served.truth.decode(ids, skip_special_tokens=skip)


def test_a_stop_string_ends_inside_a_token(served: Served) -> None:
    assert generated(served, allowed_token_ids=[WORD], stop=["zibarzan"]) == ([WORD, WORD], "zan", "zibarzan")


def test_a_constraint_may_use_a_token(served: Served) -> None:
    preferred = {"regex": "(zanzibar){2}", "ignore_eos": False, "logit_bias": {WORD: 100.0}, "max_new_tokens": 16}
    assert generated(served, **preferred)[:2] == ([WORD, WORD], "zanzibarzanzibar")
    # A special token has no text.
    ids, text, _ = generated(served, regex="<note>", ignore_eos=False, logit_bias={SPECIAL: 100.0}, max_new_tokens=16)
    assert (SPECIAL in ids, text) == (False, "<note>")


def test_chats_have_the_tokens(served: Served) -> None:
    chat = [{"role": "user", "content": f"x {TEXT}"}]
    rendered = served.client.render_chat(chat)
    expected = served.truth.apply_chat_template(
        chat, add_generation_prompt=True, sanitize_control_tokens=True, return_dict=False
    )
    assert list(rendered.token_ids) == expected
    options = {"allowed_token_ids": [WORD], "template_args": {"enable_thinking": False}}
    ids, text, _ = generated(served, None, chat=chat, **options)
    assert (ids, text) == ([WORD] * 4, "zanzibar" * 4)
