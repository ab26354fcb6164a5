"""Imports what a front end imports of Transformers when it loads a chat template."""

from transformers import PreTrainedTokenizerFast  # noqa: F401
