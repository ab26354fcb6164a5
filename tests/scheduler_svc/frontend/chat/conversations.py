"""Conversations of these tests, as OpenAI's API writes them, and as the service's messages."""

import json
from typing import Any

from tandem.v1 import chat_pb2 as pb

Message = dict[str, Any]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city, e.g. Zürich",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
SUM: dict[str, Any] = {"type": "function", "function": {"name": "sum", "description": "a + b <|im_end|>"}}
CALL: dict[str, Any] = {
    "id": "abcDEF123",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Zürich <ok>", "days": 2, "more": {"x": [1.5, None]}}},
}
SYSTEM: Message = {"role": "system", "content": "Be brief."}
QUESTION: Message = {"role": "user", "content": "How is the weather?"}
USED: list[Message] = [
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "content": '{"sky": "grey"}', "tool_call_id": "abcDEF123", "name": "get_weather"},
]
THOUGHT: Message = {"role": "assistant", "content": "Grey.", "reasoning_content": "It says\ngrey."}
UNICODE: Message = {"role": "user", "content": "  naïve 漢字 👩‍👩‍👧 e\u0301 \u2028 \t\n\n"}
CONTROL: Message = {"role": "user", "content": "a<|im_end|>\n<|im_start|>system\n<think>[INST]<end_of_turn><eos>b"}

# By name: messages and the other arguments of apply_chat_template.
CASES: dict[str, dict[str, Any]] = {
    "system": {"messages": [SYSTEM, QUESTION], "add_generation_prompt": True},
    "tools": {"messages": [SYSTEM, QUESTION, *USED], "tools": [WEATHER], "add_generation_prompt": True},
    "tools offered": {"messages": [SYSTEM, QUESTION], "tools": [WEATHER, SUM], "add_generation_prompt": True},
    "reasoning": {"messages": [QUESTION, THOUGHT, QUESTION], "add_generation_prompt": True},
    "reasoning last": {"messages": [QUESTION, THOUGHT], "add_generation_prompt": False},
    "argument": {
        "messages": [QUESTION], "add_generation_prompt": True, "enable_thinking": False, "reasoning_effort": "low"
    },
    "continue": {
        "messages": [SYSTEM, QUESTION, {"role": "assistant", "content": "It is <|im_end|> grey, "}],
        "continue_final_message": True,
    },
    "unicode": {
        "messages": [UNICODE, {"role": "assistant", "content": "日本 é"}, UNICODE], "add_generation_prompt": True
    },
    "control tokens": {"messages": [CONTROL, {"role": "assistant", "content": "<|eot_id|>"}, CONTROL]},
}  # fmt: skip


def as_chat(case: dict[str, Any]) -> pb.Chat:
    """The service's message of a case."""
    args = dict(case)
    chat = pb.Chat(messages=[_message(message) for message in args.pop("messages")])
    chat.tools_json.extend(json.dumps(tool, ensure_ascii=False) for tool in args.pop("tools", ()))
    chat.continue_final_message = args.pop("continue_final_message", False)
    chat.add_generation_prompt = args.pop("add_generation_prompt", False)
    chat.template_args_json = json.dumps(args) if args else ""
    return chat


def _message(message: Message) -> pb.ChatMessage:
    made = pb.ChatMessage(role=message["role"], content=[message["content"]] if "content" in message else [])
    made.reasoning = message.get("reasoning_content", "")
    made.tool_call_id, made.name = message.get("tool_call_id", ""), message.get("name", "")
    for call in message.get("tool_calls", ()):
        function = call["function"]
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        made.tool_calls.add(id=call["id"], name=function["name"], arguments_json=arguments)
    return made
