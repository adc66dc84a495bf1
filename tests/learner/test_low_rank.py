"""An adapter's update, against a whole model whose matrices are base + product, and PEFT."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch.func import functional_call

from earl_core.config.model import AdapterConfig, ModelConfig
from earl_core.config.update import UpdateConfig
from earl_core.learner.data.packing import TrainingSample
from earl_core.learner.low_rank import base_alone
from earl_core.learner.policy_learner import PolicyLearner
from earl_core.pretrained.adapter_checks import check_adapter, check_first_pairs
from earl_core.pretrained.adapter_directory import is_adapter, matrix_name
from earl_core.pretrained.weight_digest import stored_digest
from earl_core.system.errors import ConfigError
from earl_core.tensors.errors import CheckpointError
from earl_core.tensors.hashing import digest_of
from earl_core.weights.adapter import write_merged
from earl_core.weights.load import tensor_files
from tests.learner import adapter_ranks
from tests.learner.helpers import eager_model, plain_logprobs, random_samples, save_model
from tests.learner.launched import launch
from tests.learner.test_mesh_equality import LARGEST
from tests.learner.test_policy_learner import TEMPERATURE, make_learner
from tests.learnt import assert_learnt

RANK, ALPHA = 3, 6.0
SMOOTH = {"epsilon": 1e-2, "learning_rate": 0.05, "weight_decay": 0.1, "max_grad_norm": 0.5}
GRADIENT = {"policy_loss": "policy_gradient"}


def peft_model(base: Path, targets: list[str] | str, **settings: Any) -> PeftModel:
    """PEFT's own, with random A and B; `targets` as it takes them."""
    torch.manual_seed(11)
    config = LoraConfig(
        **{"r": RANK, "lora_alpha": int(ALPHA), "init_lora_weights": False} | settings,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(eager_model(base), config)


def trained_by_peft(base: Path, targets: list[str] | str, directory: Path) -> Path:
    """An adapter after a step of PEFT's."""
    model = peft_model(base, targets)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    (
        -torch.cat([plain_logprobs(model, each, 1.0)[0] for each in random_samples(2)])
    ).mean().backward()
    optimizer.step()
    model.save_pretrained(directory)
    return directory


def plain_updates(
    base: Path, start: Path, samples: list[TrainingSample], config: UpdateConfig
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Pairs by PEFT's names after `epochs` steps of AdamW, in float64, of a whole model whose
    matrices are made of them; and the gradients' norms."""
    model = eager_model(base).double()
    frozen = {name: each.detach() for name, each in model.named_parameters()}
    pairs = {
        name: each.double().requires_grad_()
        for name, each in load_file(start / "adapter_model.safetensors").items()
    }
    optimizer = torch.optim.AdamW(
        pairs.values(), lr=config.learning_rate, weight_decay=config.weight_decay,
        betas=(config.beta1, config.beta2), eps=config.epsilon,
    )  # fmt: skip
    norms = []
    for _ in range(config.epochs):
        weights = dict(frozen)
        for first, a in pairs.items():
            if ".lora_A." in first:
                b = pairs[first.replace("lora_A", "lora_B")]
                weights[matrix_name(first)] = weights[matrix_name(first)] + ALPHA / RANK * b @ a

        def call(weights: dict[str, torch.Tensor] = weights, **given: torch.Tensor) -> Any:
            return functional_call(model, weights, (), given)

        terms = [
            -float(sample.advantages[0]) * plain_logprobs(call, sample, TEMPERATURE)[0]
            for sample in samples
        ]
        optimizer.zero_grad()
        torch.cat(terms).mean().backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(pairs.values(), config.max_grad_norm)))
        optimizer.step()
    return {name: each.detach() for name, each in pairs.items()}, norms


def log_probs(learner: PolicyLearner, samples: list[TrainingSample]) -> list[torch.Tensor]:
    return [
        torch.from_numpy(scored[sample.loss_mask == 1])
        for sample, scored in zip(samples, learner.score(samples), strict=True)
    ]


@pytest.mark.parametrize(
    ("kind", "targets"),
    [("llama", "all-linear"), ("qwen2", ["v_proj", "down_proj", "1.mlp.up_proj"])],
)
def test_what_peft_trained_goes_on_as_a_whole_model_of_base_and_product_would(
    kind: str, targets: Any, tmp_path: Path
) -> None:
    base = save_model(kind, tmp_path / "base")
    start = trained_by_peft(base, targets, tmp_path / "start")
    adapter = {"rank": RANK, "alpha": ALPHA, "targets": targets, "from": str(start)}
    learner = make_learner(base, GRADIENT, adapter=adapter, epochs=3, **SMOOTH)
    samples = random_samples(12)
    before = {name: each.clone() for name, each in learner.parallel.published.items()}
    metrics = learner.update(samples, iteration=0)
    expected, norms = plain_updates(base, start, samples, learner.config)
    found = learner.parallel.published
    assert_learnt(norms, before, found)
    assert metrics["grad_norm"] == pytest.approx(sum(norms) / len(norms), rel=1e-5)
    assert found.keys() == expected.keys()
    for name, each in found.items():
        assert float((each - expected[name]).abs().max()) < 1e-6, name
    learner.save(tmp_path / "state", {})
    theirs = PeftModel.from_pretrained(eager_model(base), tmp_path / "state" / "adapter")
    for sample, ours in zip(samples, log_probs(learner, samples), strict=True):
        assert torch.allclose(
            plain_logprobs(theirs, sample, TEMPERATURE)[0].float(), ours, atol=1e-5
        )
    shutil.copytree(base, tmp_path / "merged")
    write_merged(tmp_path / "state" / "adapter", base, tmp_path / "merged")
    merged = log_probs(make_learner(tmp_path / "merged"), samples)
    for one, other in zip(merged, log_probs(learner, samples), strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    with base_alone(learner.model):
        alone = log_probs(learner, samples)
    for sample, ours in zip(samples, alone, strict=True):
        plain = plain_logprobs(eager_model(base), sample, TEMPERATURE)[0].float()
        assert torch.allclose(plain, ours, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "ranks", "shapes"),
    [
        ("compare", 2, 4),
        ("compare_pairs", 4, 3),
        pytest.param("compare", 4, 10, marks=pytest.mark.campaign),
    ],
)
def test_adapters_on_every_mesh_equal_one_process(
    function: str, ranks: int, shapes: int, tmp_path: Path
) -> None:
    adapter_ranks.prepare(tmp_path)
    scratch = tmp_path / "ranks"
    found = launch("tests.learner.adapter_ranks", function, ranks, scratch, timeout_seconds=900)
    for rank, differences in enumerate(found):
        assert len({name.partition(")")[0] for name in differences}) == shapes
        worst = {
            name: difference
            for name, difference in differences.items()
            if not difference <= LARGEST.get(name.rpartition(" ")[2], 1e-6)
        }
        assert not worst, f"rank {rank}"


def test_a_fresh_adapter_is_the_base_and_follows_the_seed(tmp_path: Path) -> None:
    base, samples = save_model("llama", tmp_path), random_samples(4)
    one, same, other = (
        make_learner(base, adapter={"rank": 4}, seed=seed).parallel.published for seed in (1, 1, 2)
    )
    for name, each in one.items():
        assert torch.equal(each, same[name])
        assert torch.equal(each, other[name]) == ("lora_B" in name), name
        assert each.any() == ("lora_A" in name), name
    scores = [make_learner(base, adapter=adapter).score(samples) for adapter in ({"rank": 4}, None)]
    assert all((a == b).all() for a, b in zip(*scores, strict=True))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, and adapters that cannot go on beside it."""
    scratch = tmp_path_factory.mktemp("adapters")
    base, names = save_model("llama", scratch / "base"), ["q_proj", "k_proj"]
    peft_model(base, names).save_pretrained(scratch / "start")
    peft_model(base, names, use_dora=True).save_pretrained(scratch / "dora")
    peft_model(base, names, bias="lora_only").save_pretrained(scratch / "biased")
    shutil.copytree(scratch / "start", scratch / "of_other")
    pairs = load_file(scratch / "start" / "adapter_model.safetensors")
    wider = {n: torch.cat([p, p], -1) if "_A" in n else p for n, p in pairs.items()}
    save_file(wider, scratch / "of_other" / "adapter_model.safetensors")
    for name, changed in (
        ("pissa", {"init_lora_weights": "pissa_niter_4"}),
        ("sizeless", {"r": None}),
        ("kasa", {"kasa_config": {}, "arrow_config": {"top_k": 2}}),
    ):
        shutil.copytree(scratch / "start", scratch / name)
        place = scratch / name / "adapter_config.json"
        place.write_text(json.dumps(json.loads(place.read_text()) | changed))
    shutil.copytree(scratch / "start", scratch / "run" / "checkpoints" / "000003" / "adapter")
    shutil.copytree(scratch / "start", scratch / "broken")
    (scratch / "broken" / "adapter_model.safetensors").write_bytes(b"nothing")
    return scratch


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        (
            {"targets": ["q_proj", "gate"]},
            r"names 'gate', which is no matrix .* they have down_proj",
        ),
        ({"targets": ["lm_head"]}, "head and embedding get no pair"),
        ({"targets": ["embed_tokens"]}, "head and embedding get no pair"),
        ({"rank": 17}, r"rank 17 exceeds the smaller size of model\.layers\.0\.self_attn\.k_proj"),
        ({"from": "nowhere"}, r"has no adapter_config\.json$"),
        ({"from": "run"}, r"has no adapter_config\.json: name .*/checkpoints/000003/adapter$"),
        ({"from": "start", "rank": 4, "alpha": 6}, "of rank 3, and model.adapter.rank is 4: set"),
        ({"from": "start", "rank": 3}, "of alpha 6, and model.adapter.alpha is 32: set it to 6"),
        ({"from": "start", "rank": 3, "alpha": 6, "targets": ["v_proj"]}, "4 tensors are missing"),
        ({"from": "dora", "rank": 3, "alpha": 6}, "with use_dora True, which is more than"),
        ({"from": "biased", "rank": 3, "alpha": 6}, "with bias 'lora_only', which is more than"),
        ({"from": "of_other", "rank": 3, "alpha": 6}, "the adapter in .* another model .* and "),
        ({"from": "pissa", "rank": 3, "alpha": 6}, "'pissa_niter_4', which changed the matrices"),
        ({"from": "sizeless", "rank": 3, "alpha": 6}, "has None as r, which is no size of a pair"),
        ({"from": "kasa", "rank": 3, "alpha": 6}, "with arrow_config .*, which is more than"),
        ({"from": "broken", "rank": 3, "alpha": 6}, "is no safetensors file that can be read"),
    ],
)
def test_adapters_that_cannot_be_are_one_sentence(
    adapter: dict[str, Any], said: str, made: Path
) -> None:
    if "from" in adapter:
        adapter = adapter | {"from": str(made / adapter["from"])}
    with pytest.raises(ConfigError, match=said):
        make_learner(made / "base", adapter={"targets": ["q_proj", "k_proj"]} | adapter)


def test_an_adapter_of_other_matrices_is_found_by_the_headers(made: Path) -> None:
    """Before a run has begun, which could not go on with other settings."""
    for targets, said in (
        ("all-linear", r"20 tensors are missing \(such as down_proj\.lora_A 3 x 48\): correct"),
        (["q_proj"], r"4 tensors are not expected \(such as k_proj\.lora_A 3 x 32\): correct"),
    ):
        adapter = {"from": str(made / "start"), "rank": 3, "alpha": 6, "targets": targets}
        model = ModelConfig.model_validate({"path": str(made / "base"), "adapter": adapter})
        with pytest.raises(ConfigError, match=said):
            check_adapter(model)
    other = save_model("gpt2", made / "gpt2")
    with pytest.raises(ConfigError, match="is a gpt2 model, whose matrices are no linear layers"):
        check_adapter(ModelConfig(path=str(other), adapter=AdapterConfig()))
    experts = made / "experts"
    shutil.copytree(made / "base", experts)
    config = json.loads((experts / "config.json").read_text())
    mixture = {"num_local_experts": 8, "num_experts_per_tok": 2}
    (experts / "config.json").write_text(json.dumps(config | mixture))
    with pytest.raises(ConfigError, match="is a mixture of 8 experts, beside which no adapter is"):
        check_adapter(ModelConfig(path=str(experts), adapter=AdapterConfig()))


def test_a_whole_model_with_an_adapters_settings_beside_it_is_named(
    made: Path, tmp_path: Path
) -> None:
    """As `merge_and_unload` leaves it; transformers would load the model that they name."""
    shutil.copytree(made / "base", tmp_path / "model")
    shutil.copyfile(made / "start" / "adapter_config.json", tmp_path / "model/adapter_config.json")
    assert is_adapter(made / "start")
    assert not is_adapter(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"a whole model, but has an adapter_config\.json, by"):
        check_adapter(ModelConfig(path=str(tmp_path / "model")))


def test_a_merged_model_keeps_the_index_of_a_single_file(made: Path, tmp_path: Path) -> None:
    base, target = tmp_path / "base", tmp_path / "merged"
    shutil.copytree(made / "base", base)
    target.mkdir()
    file = (base / "model.safetensors").rename(base / "model-00001-of-00001.safetensors")
    names = dict.fromkeys(load_file(file), file.name)
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    write_merged(made / "start", base, target)
    assert tensor_files(target, "model") == [target / file.name]
    whole, merged = load_file(file), load_file(target / file.name)
    moved = {name for name, each in merged.items() if not torch.equal(each, whole[name])}
    assert {name.rpartition(".self_attn.")[2] for name in moved} == {
        "q_proj.weight",
        "k_proj.weight",
    }


def test_a_state_of_another_base_or_of_other_settings_is_refused(tmp_path: Path) -> None:
    base, other = save_model("llama", tmp_path / "base"), tmp_path / "other"
    shutil.copytree(base, other)
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"] += 1.0
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    learner = make_learner(base, adapter={"rank": 4})
    learner.save(tmp_path / "state", {"policy_version": 1})
    described = json.loads((tmp_path / "state" / "adapter" / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == str(base)
    with pytest.raises(ConfigError, match="trained beside weights of digest"):
        make_learner(other, adapter={"rank": 4}).restore(tmp_path / "state")
    # A run that would begin with it is refused before anything of it is written.
    assert stored_digest(base) == digest_of(load_file(base / "model.safetensors"))
    pairs = {"rank": 4, "from": str(tmp_path / "state" / "adapter")}
    check_first_pairs(ModelConfig.model_validate({"path": str(base), "adapter": pairs}))
    begins = ModelConfig.model_validate({"path": str(other), "adapter": pairs})
    with pytest.raises(ConfigError, match=r"beside weights of digest .* has .*: take the"):
        check_first_pairs(begins)
    with pytest.raises(ConfigError, match=r"alpha 32\.0, and model.adapter.alpha is 8: set it"):
        make_learner(base, adapter={"rank": 4, "alpha": 8}).restore(tmp_path / "state")
    for adapter in ({"rank": 4, "targets": ["q_proj"]}, None):
        with pytest.raises(CheckpointError, match="is of another model"):
            make_learner(base, adapter=adapter).restore(tmp_path / "state")
    assert make_learner(base, adapter={"rank": 4}).restore(tmp_path / "state")


@pytest.mark.slow
def test_compiled_layers_with_pairs_compute_what_others_do(tmp_path: Path) -> None:
    base, samples = save_model("llama", tmp_path), random_samples(8)
    learners = [
        make_learner(base, GRADIENT, adapter={"rank": 4}, epochs=3, compile=compiled, **SMOOTH)
        for compiled in (False, True)
    ]
    norms = [each.update(samples, iteration=0)["grad_norm"] for each in learners]
    assert norms[0] > 1e-3
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    plain, compiled = (each.parallel.published for each in learners)
    for name, each in plain.items():
        assert torch.allclose(each, compiled[name], atol=1e-6), name
    with base_alone(learners[0].model), base_alone(learners[1].model):
        alone = [log_probs(each, samples) for each in learners]
    again = log_probs(learners[1], samples)
    for one, other, moved in zip(*alone, again, strict=True):
        assert torch.allclose(one, other, atol=1e-5)
        assert not torch.allclose(moved, other, atol=1e-3)
