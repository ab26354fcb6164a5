"""The limits that the help of `tandem generate` and the client's README name are those of the protos."""

import re
from pathlib import Path

from tandem.v1.inference_pb2 import GenerateRequest
from typer.main import get_command

from tandem_client.cli.__main__ import app
from tandem_client.cli.names import FLAGS
from tandem_client.wire.parts import SAMPLING
from tandem_contract.limits import limit_at

NUMBER = r"(-?\d[\d,]*(?:\.\d+)?)"
# What the words before and between numbers say of them.
WORDS = {
    rf"above {NUMBER} to {NUMBER}": ("above", "most"),
    rf"(?<!above )(?<![\d.-]){NUMBER} to {NUMBER}": ("least", "most"),
    rf"up to {NUMBER}": ("most",),
    rf"above {NUMBER}(?! to)": ("above",),
    rf"at most {NUMBER} characters": ("chars",),
}
# At least 0 is what an unsigned number is.
NAMED = {
    *("--request-id", "--priority", "--logit-bias", "--max-time", "--salt", "--linger"),
    *(FLAGS[f"sampling.{name}"] for name, (kind, _) in SAMPLING.items() if kind is float),
}


def test_the_help_of_generate_names_the_limits_of_the_protos() -> None:
    texts = {name: each.help for each in get_command(app).commands["generate"].params for name in each.opts}
    named = set[str]()
    for path, flag in FLAGS.items():
        text = texts.get(flag, "") or ""
        for words, parts in WORDS.items():
            for found in re.finditer(words, text):
                limit = limit_at(GenerateRequest, path)
                assert [float(each.replace(",", "")) for each in found.groups()] == [
                    getattr(limit, part) for part in parts
                ], (flag, found[0])
                named.add(flag)
    assert named == NAMED


def test_the_readme_names_the_longest_time_without_a_reader() -> None:
    text = (Path(__file__).resolve().parents[3] / "client/README.md").read_text("utf-8")
    longest = limit_at(GenerateRequest, "resume.linger_seconds").most
    assert re.findall(r"`linger_seconds` \(60 if unset,\s+at most (\d+)\)", text) == [f"{longest:g}"]
