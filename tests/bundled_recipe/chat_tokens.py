"""The bundled model's tokens of chats: their ids, their rows, and the template that writes them.

Owns what is added after the training. The tokens are appended, so the trained ids keep their places. Each new row is
the mean of the trained rows: its logit is the mean of theirs, so it is never the largest, and greedy outputs stay.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer

from tests.bundled_recipe.evaluate import MODEL_DIR
from tests.bundled_recipe.tokenizer import EOS_ID, TRAINED_TOKENS, VOCAB_SIZE

TEMPLATE = "chat_template.jinja"
# In the order of their ids. Those that begin and end a turn are special: they are left out of texts.
TURN_TOKENS = ("<|im_start|>", "<|im_end|>")
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TURN_END_ID = TRAINED_TOKENS + TURN_TOKENS.index("<|im_end|>")
EOS_IDS = [EOS_ID, TURN_END_ID]


def add_chat(folder: Path) -> None:
    """Adds tokens, rows and template to a model that was trained without them. Raises ValueError if it has them."""
    weights = load_file(folder / "model.safetensors")
    trained = weights["model.embed_tokens.weight"]
    if len(trained) != TRAINED_TOKENS:
        raise ValueError(f"{folder} has {len(trained)} rows; a model without the tokens of chats has {TRAINED_TOKENS}")
    mean = trained.float().mean(0, keepdim=True).to(trained.dtype)
    weights["model.embed_tokens.weight"] = torch.cat([trained, mean.expand(VOCAB_SIZE - TRAINED_TOKENS, -1)])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in TURN_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    _change(folder / "config.json", vocab_size=VOCAB_SIZE)
    _change(folder / "generation_config.json", eos_token_id=EOS_IDS)
    if folder.resolve() != MODEL_DIR.resolve():
        shutil.copy(MODEL_DIR / TEMPLATE, folder / TEMPLATE)


def _change(path: Path, **settings: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | settings, indent=2) + "\n")
