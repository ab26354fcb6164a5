"""instructor: typed answers. Arguments: the gateway's URL, the model's folder (unused)."""

import sys
from importlib.metadata import version
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field


class Person(BaseModel):
    """The fields that the model has to fill in, and no others. The model babbles, so every field has a bound."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=12, pattern="^[a-z]+$")
    age: int = Field(ge=0, le=120)
    likes: list[Literal["tea", "rain"]] = Field(min_length=1, max_length=2)


url = sys.argv[1]
# The model would think without an end.
PLAIN = {"chat_template_kwargs": {"enable_thinking": False}}
MESSAGES = [{"role": "user", "content": "Who is it?"}]
count = 0
for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
    client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="k"), mode=mode)
    for seed in range(5):
        person = client.chat.completions.create(
            model="bundled", messages=MESSAGES, response_model=Person, max_retries=1, seed=seed, max_tokens=400,
            temperature=0.7, extra_body=PLAIN,
        )  # fmt: skip
        assert isinstance(person, Person) and 0 <= person.age <= 120
        count += 1
print(f"instructor {version('instructor')}, openai {version('openai')}: {count} of {count} answers are valid")
