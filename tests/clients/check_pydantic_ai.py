"""pydantic-ai: typed answers, and a tool loop. Arguments: the gateway's URL, the model's folder (unused)."""

import asyncio
import sys
from importlib.metadata import version

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

url = sys.argv[1]
# The model would think, and call, without an end.
PLAIN = {
    "extra_body": {"chat_template_kwargs": {"enable_thinking": False}}, "parallel_tool_calls": False,
    "max_tokens": 300, "temperature": 0.7,
}  # fmt: skip
MODEL = OpenAIChatModel("bundled", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="k"))


class City(BaseModel):
    """The model babbles, so every field has a bound."""

    name: str = Field(max_length=12, pattern="^[A-Za-z]+$")
    people: int = Field(ge=0, le=10_000_000)


async def main() -> int:
    """Returns the number of valid answers."""
    count = 0
    for output in (NativeOutput(City), ToolOutput(City)):
        agent = Agent(MODEL, output_type=output, retries=0)
        for seed in range(5):
            answer = await agent.run("Which city?", model_settings={**PLAIN, "seed": seed})
            assert isinstance(answer.output, City)
            count += 1
    called: list[int] = []
    agent = Agent(MODEL, output_type=ToolOutput(City), retries=0)

    @agent.tool_plain
    def population(year: int = 0) -> int:
        """The number of people in a year."""
        called.append(year)
        return 5

    answer = await agent.run("Which city?", model_settings={**PLAIN, "seed": 1})
    assert isinstance(answer.output, City)
    async with Agent(MODEL).run_stream("Say something", model_settings={"max_tokens": 20}) as stream:
        text = "".join([piece async for piece in stream.stream_text(delta=True)])
    assert text
    return count + 1


found = asyncio.run(main())
print(f"pydantic-ai {version('pydantic-ai-slim')}, openai {version('openai')}: {found} of {found} answers are valid")
