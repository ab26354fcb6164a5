"""The sizes of tiny runs. All parts share them, so that a CPU compiles few kernels."""

from typing import Any

TINY_MODEL = "tiny Qwen3"
TINY_SIZES: dict[str, Any] = {"max_rows": 4, "max_length": 256, "token_budget": 192, "num_pages": 20}
