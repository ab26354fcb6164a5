"""Rendered chats: the ids of AutoTokenizer for each template, and control tokens from the template alone."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem.internal.v1 import worker_pb2
from tandem.v1 import chat_pb2 as pb
from tokenizers import Tokenizer

from gpu_worker.checkpoint.tokenizer import read_tokenizer
from scheduler_svc.frontend.chat import conversation, rendering
from scheduler_svc.frontend.chat.rendering import MARKERS, Rendered, Renderer
from scheduler_svc.frontend.rpc.status import Refusal
from tests.rigs.waiting import TIMEOUT_SECONDS
from tests.scheduler_svc.frontend.chat.conversations import CASES, WEATHER, as_chat
from tests.scheduler_svc.frontend.chat.rig import TEMPLATE, TOOL, tokenizer, user
from tests.scheduler_svc.frontend.failures import refused
from tests.scheduler_svc.frontend.tokenizers_for_tests import BOS, EOS, as_json

FOLDER = Path(__file__).parent / "templates"
TEMPLATES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.jinja"))} | {
    "bundled": TEMPLATE
}
# A mark as templates write it, and those that they build of pieces.
MARK = re.compile(r"<[|/｜]?[a-zA-Z][^<>{}()\s=]*>|\[/?[A-Za-z_]+\]")
BUILT = ("<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|observation|>")
# Marks that real tokenizers have as ordinary added tokens.
NOT_SPECIAL = re.compile(r"</?think>|</?tool_call>|</?tool_response>|</?arg_\w+>|<\|tool_call.*>|\[/?THINK\]")
MAX_CHARS = 100_000
# Of the model that the folders belong to.
VOCAB_SIZE = 512


def marks_of(template: str) -> list[str]:
    return sorted({*MARK.findall(template), *BUILT, "<|im_end|>", "<think>"} - {BOS, EOS})


def write_checkpoint(folder: Path, template: str, **config: Any) -> Path:
    """The files of a checkpoint that concern chats."""
    folder.mkdir()
    marks = marks_of(template)
    plain = [mark for mark in marks if NOT_SPECIAL.fullmatch(mark)]
    made = tokenizer([mark for mark in marks if mark not in plain], plain)
    (folder / "tokenizer.json").write_bytes(as_json(made))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(names | config))
    if template:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


def renderer_of(folder: Path) -> Renderer:
    """The front end's renderer of the files that the worker sends."""
    made = read_tokenizer(folder, VOCAB_SIZE)
    sent = worker_pb2.ChatFiles(named_templates=made.named_templates, tokenizer_config_json=made.settings_json)
    return Renderer(Tokenizer.from_str(made.backend_json.decode()), made.template, sent)


def render(renderer: Renderer, chat: pb.Chat) -> Rendered:
    return renderer.render(conversation.read(chat), MAX_CHARS)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each template, and folders with other settings."""
    root = tmp_path_factory.mktemp("checkpoints")
    folders = {name: write_checkpoint(root / name, template) for name, template in TEMPLATES.items()}
    hermes, plain = TEMPLATES["hermes"], TEMPLATES["chatml"]
    named = [{"name": "default", "template": plain}, {"name": "tool_use", "template": hermes}]
    folders["list of templates"] = write_checkpoint(root / "list", "", chat_template=named)
    folders["named file"] = write_checkpoint(root / "named", plain)
    (root / "named" / "additional_chat_templates").mkdir()
    (root / "named" / "additional_chat_templates" / "tool_use.jinja").write_text(hermes)
    folders["settings"] = write_checkpoint(
        root / "settings",
        "{{ pad_token }}{{ image_token }}" + hermes,
        pad_token={"__type": "AddedToken", "content": "<pad>", "special": True},
        image_token="<image>",
        extra_special_tokens=["<extra>", "weather"],
        chat_control_tokens=["<think>"],
        add_prefix_space=True,
        clean_up_tokenization_spaces=True,
    )
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    folders["added tokens"] = write_checkpoint(
        root / "added", hermes, added_tokens_decoder={"300": {"content": "brief", **flags}}
    )
    return folders


@pytest.fixture(scope="module")
def truth(checkpoints: dict[str, Path]) -> dict[str, dict[str, list[int] | None]]:
    """The ids of every case, by AutoTokenizer in another process."""
    command = [sys.executable, "-m", "tests.scheduler_svc.frontend.chat.auto_tokenizer"]
    folders = {name: str(folder) for name, folder in checkpoints.items()}
    done = subprocess.run(
        [*command, *folders.values()], capture_output=True, text=True, check=True, timeout=TIMEOUT_SECONDS
    )
    found = json.loads(done.stdout)
    return {name: found[folder] for name, folder in folders.items()}


OTHERS = ("list of templates", "named file", "settings", "added tokens")
# They take other messages than those of OpenAI's API as they are; see test_shape.
RESHAPED = {"deepseek_text", "gemma_tools", "mistral_strict", "parts_only"}
# They have no place for calls.
CALLS_LOST = {(name, "tools") for name in ("chatml", "gemma3", "phi3")}


@pytest.mark.parametrize("name", [*sorted(TEMPLATES.keys() - RESHAPED), *OTHERS])
def test_ids_are_those_of_auto_tokenizer(
    name: str, checkpoints: dict[str, Path], truth: dict[str, dict[str, list[int] | None]]
) -> None:
    renderer = renderer_of(checkpoints[name])
    refused: list[str] = []
    for case, arguments in CASES.items():
        expected = truth[name][case]
        if (name, case) in CALLS_LOST:
            with pytest.raises(Refusal, match="has 1 call; the model's chat template shows none"):
                render(renderer, as_chat(arguments))
        elif expected is None:
            refused.append(case)
            with pytest.raises(Refusal, match="the model's chat template refuses the chat"):
                render(renderer, as_chat(arguments))
        else:
            assert render(renderer, as_chat(arguments)).token_ids == expected, case
    assert len(refused) <= 4, f"{name} renders too few cases to prove anything: {refused}"


def test_most_templates_render_every_case(truth: dict[str, dict[str, list[int] | None]]) -> None:
    rendered = [ids is not None for cases in truth.values() for ids in cases.values()]
    assert sum(rendered) >= 0.9 * len(rendered)


@cache
def shared_renderer(name: str, template: str = "") -> Renderer:
    marks = marks_of(TEMPLATES[name])
    names = json.dumps({"bos_token": BOS, "eos_token": EOS})
    files = worker_pb2.ChatFiles(tokenizer_config_json=names)
    return Renderer(tokenizer(marks, ()), template or TEMPLATES[name], files)


def control_ids(renderer: Renderer, rendered: Rendered) -> list[int]:
    tokens = renderer._tokenizer.added_tokens_decoder
    return [token for token in rendered.token_ids if token in tokens]


@st.composite
def hostile(draw: st.DrawFn, name: str) -> tuple[pb.Chat, pb.Chat]:
    """The same chat twice: with marks in every field that a caller fills, and with letters instead."""
    marks = [*marks_of(TEMPLATES[name]), BOS, EOS]
    pieces = st.lists(st.sampled_from([*marks, "a", " ", "\n", "<|", "|>", "im_end", *MARKERS]), max_size=5)
    fields: list[str] = []

    def text() -> str:
        fields.append("".join(draw(pieces)))
        return f"\0{len(fields) - 1}\0"

    tool = {
        **WEATHER,
        "function": {**WEATHER["function"], "description": text(), "parameters": {"title": text(), "enum": [text()]}},
    }
    messages = [
        {"role": "system", "content": text()},
        {"role": "user", "content": text()},
        {"role": "assistant", "reasoning_content": text(), "tool_calls": [
            {"id": text(), "function": {"name": f"n{text()}", "arguments": {"city": text(), "more": [{"k": text()}]}}}
        ]},
        {"role": "tool", "content": text(), "tool_call_id": text(), "name": text()},
        {"role": "assistant", "content": text(), "reasoning_content": text()},
        {"role": "user", "content": text()},
    ]  # fmt: skip
    case = {"messages": messages, "tools": [tool], "add_generation_prompt": True, "reasoning_effort": text()}
    chat = as_chat(case).SerializeToString(deterministic=True)
    return _filled(chat, lambda idx: fields[idx]), _filled(chat, lambda idx: "q" if fields[idx].strip(MARKERS) else "")


def _filled(data: bytes, value: Callable[[int], str]) -> pb.Chat:
    """Puts values where the numbers stand, also in JSON."""
    chat = pb.Chat.FromString(data)
    plain, escaped = re.compile("\0(\\d+)\0"), re.compile(r"\\u0000(\d+)\\u0000")

    def put(text: str) -> str:
        text = plain.sub(lambda found: value(int(found[1])), text)
        return escaped.sub(lambda found: json.dumps(value(int(found[1])))[1:-1], text)

    def fill(message: Any) -> None:
        for field, inside in message.ListFields():
            if field.message_type is not None:
                for each in inside if field.is_repeated else [inside]:
                    fill(each)
            elif field.type == field.TYPE_STRING and field.is_repeated:
                inside[:] = [put(each) for each in inside]
            elif field.type == field.TYPE_STRING:
                setattr(message, field.name, put(inside))

    fill(chat)
    return chat


@pytest.mark.parametrize("name", ["bundled", "harmony", "function_gemma", "kimi_k2", "mistral_args"])
@settings(max_examples=20)
@given(data=st.data())
def test_control_tokens_in_every_field_yield_the_templates_own_alone(name: str, data: st.DataObject) -> None:
    attack, harmless = data.draw(hostile(name))
    renderer = shared_renderer(name)
    assert control_ids(renderer, render(renderer, attack)) == control_ids(renderer, render(renderer, harmless))


def with_keys(key: str) -> Iterator[tuple[str, pb.Chat]]:
    """Chats with this key wherever a caller chooses keys."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {key: {"type": "string"}}}}}
    yield "chat.tools_json[0]", pb.Chat(messages=[user("a")], tools_json=[json.dumps(tool)])
    call = pb.ToolCall(name="f", arguments_json=json.dumps({"a": [{key: 1}]}))
    yield (
        "chat.messages[0].tool_calls[0].arguments_json",
        pb.Chat(messages=[pb.ChatMessage(role="assistant", tool_calls=[call])]),
    )
    args = json.dumps({"x": {"y": {key: 1}}})
    yield "chat.template_args_json", pb.Chat(messages=[user("a")], template_args_json=args)


@pytest.mark.parametrize("key", ["a<|im_end|>b", "<think>", *MARKERS, EOS])
def test_tokens_of_the_model_in_keys_are_refused(key: str) -> None:
    for field, chat in with_keys(key):
        why = refused(render, shared_renderer("bundled"), chat).message
        assert why.startswith(f"{field} has ") and "in the key" in why


def test_ordinary_keys_pass() -> None:
    for _, chat in with_keys("größe <kg> [x]"):
        assert render(shared_renderer("bundled"), chat).token_ids


def test_a_template_that_escapes_what_callers_write_refuses_control_tokens() -> None:
    template = "<|im_start|>{% for m in messages %}{{ m.content | tojson(ensure_ascii=true) }}{% endfor %}"
    renderer = Renderer(tokenizer(), template, worker_pb2.ChatFiles())
    assert render(renderer, pb.Chat(messages=[user("é")])).text == '<|im_start|>"\\u00e9"'
    with pytest.raises(Refusal, match="control tokens of the model where its template writes JSON in ASCII"):
        render(renderer, pb.Chat(messages=[user("<|im_end|>")]))


@pytest.mark.parametrize("name", ["pad_token", "bos_token", "image_token"])
def test_arguments_that_transformers_sets_are_refused(name: str) -> None:
    with pytest.raises(Refusal, match=f"has '{name}', which the server sets itself"):
        render(shared_renderer("bundled"), pb.Chat(messages=[user("a")], template_args_json=json.dumps({name: "x"})))


def test_every_name_that_transformers_takes_or_a_template_finds_is_reserved() -> None:
    import inspect

    from transformers import PreTrainedTokenizerFast
    from transformers.utils import chat_template_utils

    taken = set(inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters)
    template = chat_template_utils._compile_jinja_template(TEMPLATE)
    found = set(template.environment.globals)
    assert taken | found <= conversation.RESERVED


def test_rendering_shows_the_callers_text_as_it_is() -> None:
    chat = pb.Chat(messages=[user("a <|im_end|> b")], tools_json=[TOOL])
    rendered = render(shared_renderer("bundled"), chat)
    assert "a <|im_end|> b<|im_end|>" in rendered.text
    assert not set(MARKERS) & set(rendered.text)


def test_an_error_of_a_template_is_one_short_line() -> None:
    renderer = Renderer(tokenizer(), "{{ raise_exception('x' * 999 + '\n') }}", worker_pb2.ChatFiles())
    why = refused(render, renderer, pb.Chat(messages=[user("a")])).message
    assert why.endswith(": " + "x" * rendering.MAX_ERROR_CHARS)
