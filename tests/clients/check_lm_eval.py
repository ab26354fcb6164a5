"""lm-eval: `local-completions` against `--model hf`. Arguments: the gateway's URL, the model's folder.

The tasks are made here: texts of a kind that the model knows, with four endings each, and texts of which every token
counts. Log-likelihoods, and whether they are greedy, are compared.
"""

import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

BAR = 1e-4
url, model = sys.argv[1:3]
ENDINGS = ["return None", "raise ValueError", "self.assertEqual", "in the list"]


def write_tasks(folder: Path) -> None:
    """Writes a multiple-choice task and a rolling one, with their data."""
    lines = (Path(__file__).parents[1] / "bundled_recipe" / "prompts.txt").read_text().splitlines()[:24]
    choices = [{"text": line, "choices": ENDINGS, "answer": i % len(ENDINGS)} for i, line in enumerate(lines)]
    (folder / "choices.jsonl").write_text("\n".join(map(json.dumps, choices)) + "\n")
    (folder / "rolled.jsonl").write_text("\n".join(json.dumps({"text": f"{one}. {one}"}) for one in lines[:8]) + "\n")
    data = "dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {}\ntest_split: test\n"
    (folder / "choices.yaml").write_text(
        f"task: tandem_choices\n{data.format(folder / 'choices.jsonl')}output_type: multiple_choice\n"
        'doc_to_text: "{{text}}"\ndoc_to_target: "{{answer}}"\ndoc_to_choice: "{{choices}}"\n'
        "metric_list:\n  - metric: acc\n"
    )
    (folder / "rolled.yaml").write_text(
        f"task: tandem_rolled\n{data.format(folder / 'rolled.jsonl')}output_type: loglikelihood_rolling\n"
        'doc_to_text: ""\ndoc_to_target: "{{text}}"\nmetric_list:\n  - metric: word_perplexity\n'
    )


def run(folder: Path, kind: str, arguments: str) -> dict[str, list[object]]:
    """Runs both tasks. Returns the answers of each."""
    out = folder / kind
    done = subprocess.run(
        [
            *(sys.executable, "-m", "lm_eval", "--model", kind, "--model_args", arguments),
            *("--tasks", "tandem_choices,tandem_rolled", "--include_path", str(folder)),
            *("--log_samples", "--output_path", str(out), "--batch_size", "8", "--device", "cpu"),
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    found: dict[str, list[object]] = {}
    for path in sorted(out.rglob("samples_*.jsonl")):
        samples = sorted(map(json.loads, path.read_text().splitlines()), key=lambda sample: sample["doc_id"])
        found[path.name.split("_20")[0]] = [answer for sample in samples for answer in sample["resps"]]
    return found


def numbers(value: object) -> list[float]:
    """The numbers in nested lists; lm-eval's files have them as text."""
    if isinstance(value, list):
        return [one for each in value for one in numbers(each)]
    if isinstance(value, bool):
        return [float(value)]
    text = str(value)
    return [{"True": 1.0, "False": 0.0}[text] if text in ("True", "False") else float(text)]


with tempfile.TemporaryDirectory() as name:
    place = Path(name)
    write_tasks(place)
    served = run(
        place,
        "local-completions",
        f"model=bundled,base_url={url}/v1/completions,tokenizer={model},num_concurrent=4,max_length=512",
    )
    direct = run(place, "hf", f"pretrained={model},dtype=float32,max_length=512")
assert served.keys() == direct.keys() and len(served) == 2, (served.keys(), direct.keys())
worst, count = 0.0, 0
for task, answers in served.items():
    ours, theirs = numbers(answers), numbers(direct[task])
    assert len(ours) == len(theirs) > 0
    worst = max(worst, *(abs(one - other) for one, other in zip(ours, theirs, strict=True)))
    count += len(answers)
assert worst <= BAR, f"log-likelihoods differ by {worst}"
print(f"lm-eval {version('lm_eval')}: {count} log-likelihoods differ from --model hf by at most {worst:.1e}")
