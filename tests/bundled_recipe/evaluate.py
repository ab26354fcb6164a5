"""The bundled model's measure: cross entropy on held-out documents, and checksums of the saved files.

Owns the windows of held-out text, the loss in nats per token, and the check of a saved model against provenance.json,
which has its recorded loss. Arithmetic is always f32 on the weights as given. Knows nothing of training.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

from gpu_worker.settings import BUNDLED_MODEL
from tests.bundled_recipe.corpus import Corpus, build_corpus
from tests.bundled_recipe.tokenizer import EOS_ID

MODEL_DIR = BUNDLED_MODEL
PROVENANCE = "provenance.json"
WINDOW = 1_024
TOLERANCE = 0.02
# The quick check: the first windows only.
SUBSET_WINDOWS = 8


def encode_documents(tokenizer: Tokenizer, documents: tuple[str, ...]) -> list[torch.Tensor]:
    """One int64 tensor per document, each ended by EOS."""
    encodings = tokenizer.encode_batch(list(documents))
    return [torch.tensor([*encoding.ids, EOS_ID]) for encoding in encodings]


def held_out_windows(tokenizer: Tokenizer, corpus: Corpus) -> torch.Tensor:
    """[windows, WINDOW] token ids: the held-out documents in a row, an EOS before each."""
    stream = torch.cat([torch.tensor([EOS_ID]), *encode_documents(tokenizer, corpus.held_out)])
    num_windows = len(stream) // WINDOW
    return stream[: num_windows * WINDOW].view(num_windows, WINDOW)


@torch.inference_mode()
def token_losses(model: PreTrainedModel, windows: torch.Tensor) -> torch.Tensor:
    """[windows, WINDOW - 1] cross entropy in nats of every token after a window's first."""
    was_training = model.training
    model.eval()
    losses = [
        functional.cross_entropy(model(window[None]).logits[0, :-1].float(), window[1:], reduction="none")
        for window in windows
    ]
    model.train(was_training)
    return torch.stack(losses)


def file_checksums(folder: Path) -> dict[str, str]:
    """SHA-256 of every file in `folder` except the provenance itself."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.name != PROVENANCE]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def load_f32(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def measure(model: PreTrainedModel, windows: torch.Tensor) -> dict[str, float]:
    """Mean loss over all windows, over the first SUBSET_WINDOWS, and by distance into the window."""
    losses = token_losses(model, windows)
    return {
        "held_out_loss": losses.mean().item(),
        "held_out_loss_subset": losses[:SUBSET_WINDOWS].mean().item(),
        "held_out_loss_first_256": losses[:, :255].mean().item(),
        "held_out_loss_last_256": losses[:, -256:].mean().item(),
    }


def say_if_other_corpus(corpus: Corpus, recorded: dict[str, Any]) -> None:
    """Print a note where this corpus is not that of provenance.json, as on another CPython version."""
    if corpus.sha256 != recorded["corpus_sha256"]:
        print(
            f"NOTE: this CPython's corpus has hash {corpus.sha256}, but that of CPython "
            f"{recorded['cpython_version']} {recorded['corpus_sha256']}: the losses are of different texts, "
            "the comparison is only a hint."
        )


def verify(folder: Path = MODEL_DIR) -> bool:
    """Measure the saved model again; print what was found and whether it agrees with provenance.json."""
    recorded = json.loads((folder / PROVENANCE).read_text())
    corpus = build_corpus()
    say_if_other_corpus(corpus, recorded)
    windows = held_out_windows(Tokenizer.from_file(str(folder / "tokenizer.json")), corpus)
    found = measure(load_f32(folder), windows)["held_out_loss"]
    expected = recorded["held_out_loss"]
    agrees = abs(found - expected) <= TOLERANCE * expected
    print(
        f"{'OK' if agrees else 'DIFFERS'}: held-out loss {found:.4f} nats per token, "
        f"recorded {expected:.4f}, allowed difference {TOLERANCE:.0%}"
    )
    return agrees
