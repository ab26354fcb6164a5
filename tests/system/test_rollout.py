"""The adapter for TRL with a stub as the trainer, and checking workers, with tokens that depend on the version."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from tandem_client import Client
from tandem_client.training.rollout import TandemRollout, UpdateFailed
from tests.rigs import byte_tokenizer
from tests.rigs.oracle import next_token
from tests.rigs.processes import Rig
from tests.rigs.sampling import Settings
from tests.rigs.waiting import TIMEOUT_SECONDS


@dataclass
class Model:
    """Saves nothing that a checking worker reads."""

    folders: list[Path] = field(default_factory=list[Path])

    def save_pretrained(self, folder: Path, *, safe_serialization: bool) -> None:
        assert safe_serialization
        (folder / "model.safetensors").write_bytes(b"weights")
        self.folders.append(folder)


def trainer_of(model: Model) -> SimpleNamespace:
    args = SimpleNamespace(
        max_completion_length=6, temperature=0.0, top_p=1.0, top_k=0, min_p=None, seed=3, num_generations=2
    )
    return SimpleNamespace(
        state=SimpleNamespace(global_step=0),
        model=model,
        args=args,
        processing_class=lambda text: {"input_ids": list(text.encode())},
    )


def test_each_batch_is_sampled_with_the_trainers_weights(tmp_path: Path) -> None:
    with Rig() as rig:
        rig.worker("--max-rows", "8", late=False)
        scheduler = rig.scheduler("--weights-folders", str(tmp_path))
        with Client(scheduler.address) as client:
            client.wait_ready(TIMEOUT_SECONDS)
            model = Model()
            trainer, rollout = trainer_of(model), TandemRollout(client, tmp_path)
            batch = ["one", "one", "two", "two"]
            for step in (0, 0, 1, 2):
                trainer.state.global_step = step
                result = rollout(batch, trainer)
                version = client.load().weights_version
                assert version == model.folders[-1].name
                assert result["prompt_ids"] == [list(text.encode()) for text in batch]
                for prompt, tokens, logprobs in zip(*result.values(), strict=True):
                    assert 1 <= len(tokens) == len(logprobs) <= 6
                    for n, token in enumerate(tokens):
                        expected = next_token(
                            [*prompt, *tokens[:n]],
                            num_prompt=len(prompt),
                            settings=Settings(),
                            vocab=byte_tokenizer.NUM_DRAWN,
                            version=version,
                        )
                        assert token == expected
            # One update for each step of the trainer, and one folder is kept.
            assert len(model.folders) == 3 and [each.name for each in tmp_path.iterdir()] == [version]
            rollout.close()
            assert list(tmp_path.iterdir()) == []
            elsewhere = TandemRollout(client, tmp_path / ".." / "x")
            with pytest.raises(Exception, match="absolute path"):
                elsewhere(batch, trainer)
        assert rig.violations() == []


def test_an_update_that_fails_stops_the_trainer(tmp_path: Path) -> None:
    detail = "the first worker refused"
    client = SimpleNamespace(update_weights=lambda *_, **__: iter([SimpleNamespace(state="refused", detail=detail)]))
    with pytest.raises(UpdateFailed, match=detail):
        TandemRollout(client, tmp_path).synchronize(trainer_of(Model()))  # pyright: ignore[reportArgumentType]
