"""A run whose newest checkpoint is damaged, and one that is told to go back."""

from __future__ import annotations

from collections.abc import Callable

from tests.flows.runs import Runs


def test_a_damaged_checkpoint_costs_its_iteration_and_going_back_is_a_choice(
    runs: Runs, undisturbed: Callable[..., Runs]
) -> None:
    whole = undisturbed()
    assert runs.train_here({}) == [None]
    damaged = runs.policy(1) / "model.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    other = "update.learning_rate=5e-3"
    endings = runs.train_here({}, {"overrides": [other], "go_back": 0}, {"go_back": 0})
    assert endings == [None, None, None]
    aside = runs.run() / "set_aside"
    kept = [path / "checkpoints" / "000001" / "policy" for path in sorted(aside.iterdir())]
    assert (kept[0] / "model.safetensors").read_bytes() == bytes(data)
    # What was repeated after the damage is what had been damaged; another rate gives something
    # else; and going back once more, with the old one, the same again.
    undamaged = (whole.policy(1) / "model.safetensors").read_bytes()
    assert (kept[1] / "model.safetensors").read_bytes() == undamaged
    assert (kept[2] / "model.safetensors").read_bytes() != undamaged
    assert runs.weights(1) == whole.weights(1)
    assert [line["iteration"] for line in runs.metrics()] == [0, 1]
    assert "000001 is damaged" in runs.output_path(1).read_text()
    assert runs.shared_memory() == []
