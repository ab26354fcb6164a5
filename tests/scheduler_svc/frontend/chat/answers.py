"""Answers of each family of models as they write them, independent of the files under test: reasoning, text, calls."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How a family writes. `calls` writes several calls as one text; None: the family has no calls."""

    # Literals of its chat template, by which the file is chosen.
    literals: str
    calls: Callable[[Sequence[Call]], str] | None
    reasoning: Callable[[str], str] | None = None
    content: Callable[[str], str] = str
    # Text that follows calls is content.
    goes_on: bool = True
    # Values of arguments that are not strings keep their types only if the tool says which they are.
    is_tagged: bool = False
    # Patterns of what ends a string in its arguments, or no string may contain for another reason.
    ends_strings: tuple[str, ...] = ()

    def is_ended(self, text: str) -> bool:
        """Whether no string in its arguments may have this text."""
        return any(re.search(end, text) for end in self.ends_strings)

    def written(self, calls: Sequence[Call], reasoning: str = "r") -> str:
        """Calls, and reasoning behind them, as far as it has them."""
        text = self.calls(calls) if self.calls is not None and calls else ""
        return text + (self.reasoning(reasoning) if self.reasoning is not None and reasoning else "")

    @property
    def marks(self) -> list[str]:
        """All that its answers have beside words."""
        sample = self.written([("f", {"a": "s"}), ("f", {"a": 1})])
        return [*dict.fromkeys(re.findall(r"<[^<>]*>|\[[A-Z_/]+\]|```", sample))]


def compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def each(write: Callable[[str, dict[str, Any]], str], between: str = "") -> Callable[[Sequence[Call]], str]:
    return lambda calls: between.join(write(name, args) for name, args in calls)


def think(text: str) -> str:
    return f"<think>\n{text}\n</think>\n\n"


def think_glm(text: str) -> str:
    return f"<think>{text}</think>\n"


def think_at_once(text: str) -> str:
    return f"<think>{text}</think>"


def hermes(name: str, args: dict[str, Any]) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {compact(args)}}}\n</tool_call>'


def qwen_xml(name: str, args: dict[str, Any]) -> str:
    values = "".join(f"<parameter={key}>\n{tagged(value)}\n</parameter>\n" for key, value in args.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def glm(name: str, args: dict[str, Any]) -> str:
    values = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{tagged(value)}</arg_value>\n" for key, value in args.items()
    )
    return f"<tool_call>{name}\n{values}</tool_call>"


def tagged(value: object) -> str:
    return value if isinstance(value, str) else compact(value)


def call_list(calls: Sequence[Call], key: str = "arguments") -> str:
    return compact([{"name": name, key: args} for name, args in calls])


def gemma(open_: str, close: str, quote: str) -> Callable[[str, dict[str, Any]], str]:
    def value(item: object) -> str:
        if isinstance(item, str):
            return f"{quote}{item}{quote}"
        if isinstance(item, dict):
            return "{" + ",".join(f"{key}:{value(inner)}" for key, inner in item.items()) + "}"
        if isinstance(item, list):
            return "[" + ",".join(map(value, item)) + "]"
        return compact(item)

    return lambda name, args: f"{open_}call:{name}{value(args)}{close}"


def deepseek(calls: Sequence[Call]) -> str:
    written = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{compact(args)}\n```<｜tool▁call▁end｜>"
        for name, args in calls
    )
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


def deepseek_31(calls: Sequence[Call]) -> str:
    written = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{compact(args)}<｜tool▁call▁end｜>" for name, args in calls
    )
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


def kimi(calls: Sequence[Call]) -> str:
    written = "".join(
        f"<|tool_call_begin|>functions.{name}:{idx}<|tool_call_argument_begin|>{compact(args)}<|tool_call_end|>"
        for idx, (name, args) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>"


def harmony(name: str, args: dict[str, Any]) -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{compact(args)}<|call|>"


FAMILIES: dict[str, Family] = {
    "harmony": Family(
        literals="<|start|><|channel|><|message|>",
        calls=each(harmony, "<|start|>assistant"),
        reasoning=lambda text: f"<|channel|>analysis<|message|>{text}<|end|><|start|>assistant",
        content=lambda text: f"<|channel|>final<|message|>{text}<|end|>" if text else "",
        goes_on=False,
    ),
    "qwen-xml": Family(
        literals="<tool_call><function=<parameter=<think>",
        calls=each(qwen_xml, "\n"),
        reasoning=think,
        is_tagged=True,
        ends_strings=("\n<parameter=", r"</parameter>\s*(?:<parameter=|</function>)"),
    ),
    "glm": Family(
        literals="<tool_call><arg_key><arg_value><think>",
        calls=each(glm, "\n"),
        reasoning=think_glm,
        is_tagged=True,
        ends_strings=("\n<arg_key>", r"</arg_value>\s*(?:<arg_key>|</tool_call>)"),
    ),
    "llama3": Family(
        literals="<|start_header_id|><|eot_id|>",
        calls=each(lambda name, args: f'{{"name": "{name}", "parameters": {compact(args)}}}', "; "),
        goes_on=False,
    ),
    "mistral-args": Family(
        literals="[TOOL_CALLS][ARGS][THINK]",
        calls=each(lambda name, args: f"[TOOL_CALLS]{name}[ARGS]{compact(args)}"),
        reasoning=lambda text: f"[THINK]{text}[/THINK]",
        goes_on=False,
    ),
    "mistral-list": Family(
        literals="[TOOL_CALLS]", calls=lambda calls: f"[TOOL_CALLS]{call_list(calls)}", goes_on=False
    ),
    "hermes": Family(literals='<tool_call>{"name": "arguments"}<think>', calls=each(hermes, "\n"), reasoning=think),
    "deepseek-v3": Family(literals="<｜tool▁sep｜>```json", calls=deepseek, reasoning=think),
    "deepseek-v3.1": Family(literals="<｜tool▁sep｜>", calls=deepseek_31, reasoning=think_at_once),
    "kimi-k2": Family(literals="<|tool_call_argument_begin|>", calls=kimi, reasoning=think_at_once),
    "gemma4": Family(
        literals="<|tool_call><turn|>",
        calls=each(gemma("<|tool_call>", "<tool_call|>", '<|"|>')),
        reasoning=lambda text: f"<|channel>thought\n{text}<channel|>",
        ends_strings=(r'<\|"\|>',),
    ),
    "function-gemma": Family(
        literals="<start_function_call>",
        calls=each(gemma("<start_function_call>", "<end_function_call>", "<escape>")),
        ends_strings=("<escape>",),
    ),
    "phi4": Family(
        literals="<|tool_call|><|assistant|>",
        calls=lambda calls: f"<|tool_call|>{call_list(calls)}<|/tool_call|>",
        reasoning=think,
        goes_on=False,
    ),
    "call-list": Family(
        literals="<|tool_call|>", calls=lambda calls: f"<|tool_call|>{call_list(calls)}", reasoning=think, goes_on=False
    ),
    "think": Family(literals="<think></think>", calls=None, reasoning=think),
}
