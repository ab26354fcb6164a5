"""GuideLLM: a synchronous benchmark of chats. Arguments: the gateway's URL, the model's folder."""

import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

url, model = sys.argv[1:3]
REQUESTS = 12
with tempfile.TemporaryDirectory() as folder:
    report = Path(folder) / "benchmarks.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "guidellm", "run", "--backend", f"kind=openai_http,target={url},model=bundled"),
            *("--profile", "kind=synchronous", "--constraint", f"kind=max_requests,count={REQUESTS}"),
            *("--data", "kind=synthetic_text,prompt_tokens=40,output_tokens=16"),
            *("--tokenizer", f"kind=hf_auto,model={model}", "--output", f"kind=json,path={report}"),
            *("--disable-console", "--disable-progress"),
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-3000:]} {done.stderr[-3000:]}"
    totals = json.loads(report.read_text())["benchmarks"][0]["metrics"]["request_totals"]
assert totals["successful"] == REQUESTS and not totals["errored"], totals
print(f"guidellm {version('guidellm')}: {totals['successful']} of {REQUESTS} requests")
