"""A function of a benchmark in a process of its own: `python -m tests.measure.call FUNCTION ARGUMENTS`.

The function is named from this package on, such as `flood_client.probe`, and gets the members of a JSON object; a
coroutine runs to its end. What it returns is printed. Imports nothing that another engine's environment could lack.
"""

import asyncio
import dataclasses
import importlib
import inspect
import json
import sys
from typing import Any

_ANSWER = "answer: "


def words(function: str, **arguments: Any) -> list[str]:
    """Returns the arguments of `python -m` that call the function."""
    return [__spec__.name, function, json.dumps(arguments)]


def answer(child: Any, seconds: float) -> Any:
    """Waits until the function of this `Child` has ended. Returns what it returned."""
    return json.loads(child.wait_line(f"^{_ANSWER}(.*)$", seconds)[1])


def main() -> None:
    module, _, name = sys.argv[1].rpartition(".")
    told = getattr(importlib.import_module(f"{__package__}.{module}"), name)(**json.loads(sys.argv[2]))
    found = asyncio.run(told) if inspect.iscoroutine(told) else told
    print(f"{_ANSWER}{json.dumps(found, default=dataclasses.asdict)}", flush=True)


if __name__ == "__main__":
    main()
