"""`earl export`: a directory that transformers loads, with a model card."""

from __future__ import annotations

import subprocess
import sys

import pytest
import yaml

from earl_core.config import load_config
from tests.cli.conftest import Earl

_SAME = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

tokens = torch.tensor([[1, 2, 3, 4]])
logits = []
for directory in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert len(AutoTokenizer.from_pretrained(directory)) <= model.config.vocab_size
    assert GenerationConfig.from_pretrained(directory).eos_token_id is not None
    logits.append(model(tokens).logits)
assert torch.equal(*logits)
assert logits[0].abs().max() > 0
"""


@pytest.mark.slow
def test_export(earl: Earl, finished_run: subprocess.CompletedProcess[str]) -> None:
    target = earl.directory / "exported" / "model"
    done = earl.run("export", "done", "--to", "hf", "--output", str(target))
    assert done.returncode == 0, done.stderr
    policy = earl.directory / "runs" / "done" / "checkpoints" / "000001" / "policy"
    # The run's update had two ranks.
    compared = subprocess.run(
        [sys.executable, "-c", _SAME, str(policy), str(target)],
        env={**earl.environment, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert compared.returncode == 0, compared.stderr
    assert list(target.glob("*.safetensors"))
    card = (target / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert front["library_name"] == "transformers"
    assert "license" not in front
    for words in (
        "by 2 iterations of 2, of 4 prompts and 4 episodes",
        "`tic_tac_toe`",
        "| iteration | mean return |",
        "8 held-out episodes of policy version 2",
        "95 % Wilson interval",
        "earl train done.yaml",
        "Not chosen yet",
    ):
        assert words in card, card
    # What the card says to save is a run file.
    again = earl.directory / "again.yaml"
    again.write_text(card.split("```yaml\n")[1].split("```")[0])
    kept = {"runs_directory"}
    trained = load_config(earl.directory / "runs" / "done" / "config.yaml")
    assert load_config(again).model_dump(exclude=kept) == trained.model_dump(exclude=kept)

    again_at = ("export", "done", "--checkpoint", "best", "--output", str(target))
    # A license that was put in, and what else belongs to somebody, stays.
    for name in ("README.md", "notes/mine.txt"):
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_text("mine")
        done = earl.run(*again_at)
        assert done.returncode == 2, done.stdout
        assert f"holds what no export wrote ({name})" in done.stderr
        assert (target / name).read_text() == "mine"
        (target / name).write_text(card) if name == "README.md" else (target / name).unlink()
    done = earl.run(*again_at)
    assert done.returncode == 0, done.stderr
    assert not (target / "notes").exists()
    assert [path.name for path in target.parent.iterdir()] == ["model"]


@pytest.mark.slow
def test_what_cannot_be_exported(
    earl: Earl, finished_run: subprocess.CompletedProcess[str]
) -> None:
    foreign = earl.directory / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    refused = {
        ("--output", str(foreign)): "is no export of ours, and is not replaced",
        ("--to", "gguf"): "--to takes hf",
        ("--checkpoint", "7"): "has no whole checkpoint 7",
    }
    for arguments, words in refused.items():
        done = earl.run("export", "done", *arguments)
        assert done.returncode == 2, done.stdout
        assert words in done.stderr
    assert [path.name for path in foreign.iterdir()] == ["notes.txt"]
