"""langchain-openai: invoke, stream, tools, typed answers. Arguments: the URL, the model's folder (unused)."""

import sys
from importlib.metadata import version

from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

url = sys.argv[1]
# The model would think without an end.
PLAIN = {"chat_template_kwargs": {"enable_thinking": False}}
MODEL = ChatOpenAI(
    base_url=f"{url}/v1", api_key="k", model="bundled", seed=3, temperature=0.5, max_tokens=200, extra_body=PLAIN
)
MESSAGES = [HumanMessage("hello")]


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=12, pattern="^[A-Za-z]+$")
    people: int = Field(ge=0, le=10_000_000)


whole = MODEL.invoke(MESSAGES)
streamed = "".join(piece.content for piece in MODEL.stream(MESSAGES))
assert whole.content and whole.content == streamed and whole.usage_metadata["output_tokens"] > 0
for method in ("json_schema", "function_calling"):
    found = MODEL.with_structured_output(City, method=method).invoke(MESSAGES)
    assert isinstance(found, City), found
called = MODEL.bind_tools([City], tool_choice="City").invoke(MESSAGES)
assert [call["name"] for call in called.tool_calls] == ["City"], called
said = "invoke and stream are equal, 2 structured outputs and a tool call are valid"
print(f"langchain-openai {version('langchain-openai')}, openai {version('openai')}: {said}")
