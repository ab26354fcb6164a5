"""Renders the cases with AutoTokenizer from checkpoints' folders, as the truth: `python -m … FOLDER …` prints JSON.

A process of its own, which shares nothing with the service. An error of a template is printed as null.
"""

import json
import sys

from tests.scheduler_svc.frontend.chat.conversations import CASES


def render(folder: str) -> dict[str, list[int] | None]:
    """The ids of each case."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids: dict[str, list[int] | None] = {}
    for name, case in CASES.items():
        args = dict(case)
        try:
            ids[name] = tokenizer.apply_chat_template(
                args.pop("messages"), return_dict=False, sanitize_control_tokens=True, **args
            )
        except Exception:  # any error of a template
            ids[name] = None
    return ids


if __name__ == "__main__":
    # No id depends on it, and its import takes longer than all else.
    sys.modules["torch"] = None  # type: ignore[assignment]
    print(json.dumps({folder: render(folder) for folder in sys.argv[1:]}))
