"""The routing that was played is the routing that is trained: recorded by the engine, replayed."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from earl_core.config.algorithm import AlgorithmConfig
from earl_core.config.model import ModelConfig
from earl_core.config.update import UpdateConfig
from earl_core.learner.data.packing import TrainingSample, pack
from earl_core.learner.policy_learner import PolicyLearner
from earl_core.pretrained.routers import routers_of, unread_routers
from earl_core.rollout.engines.torch_engine import TorchEngine
from earl_core.rollout.rollout_worker import RolloutWorker
from earl_core.system.errors import ConfigError
from earl_core.trajectory.routing import RecordedRouting, RoutingError, RoutingShape
from tests.families.registry import build
from tests.rollout.chat_models import CHATML, char_tokenizer
from tests.rollout.test_worker import Setting

SHAPE = RoutingShape(layers=2, chosen=2, experts=8)


def mixture(directory: Path, template: str = CHATML, **shape: int) -> Path:
    """A random Qwen3-MoE that writes characters, with a tokenizer."""
    torch.manual_seed(3)
    tokenizer = char_tokenizer(template)
    settings = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "moe_intermediate_size": 32, "num_experts": SHAPE.experts,
        "num_experts_per_tok": SHAPE.chosen, "norm_topk_prob": True,
        "max_position_embeddings": 512, "tie_word_embeddings": False,
        "eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id,
    }  # fmt: skip
    config = transformers.Qwen3MoeConfig(**{**settings, **shape})
    model = transformers.Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
    # With experts joined, as they are published.
    model.save_pretrained(directory, save_original_format=False)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixture(tmp_path_factory.mktemp("mixture") / "model")


def played(root: Path, model: Path, **rollout: object) -> list[dict[str, object]]:
    """Rows of games of several turns on the torch engine."""
    root.mkdir()
    setting = Setting(root, model)
    setting.config["rollout"] |= rollout

    async def work(worker: RolloutWorker) -> object:
        return await worker.rollout(range(6))

    rows: list[dict[str, object]] = setting.table(setting.run(work)).to_pylist()
    return rows


def samples_of(rows: Sequence[dict[str, object]]) -> list[TrainingSample]:
    """The samples with advantages of both signs."""
    found = []
    for number, row in enumerate(rows):
        tokens = np.array(row["tokens"], np.int32)
        routing, hashes = np.array(row["routing"], SHAPE.dtype), np.array(row["routing_hash"])
        found.append(
            TrainingSample(
                tokens=tokens,
                loss_mask=np.array(row["loss_mask"], np.uint8),
                rollout_logprobs=np.array(row["rollout_logprobs"], np.float32),
                advantages=np.full(len(tokens), (-1.0) ** number, np.float32),
                routing=RecordedRouting(SHAPE, routing, len(tokens), "a sample", hashes),
                episode_id=number,
                group_id=number // 2,
                sample_id=number,
            )
        )
    return found


@pytest.fixture(scope="module")
def samples(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[TrainingSample]:
    return samples_of(played(tmp_path_factory.mktemp("played") / "run", model))


def rows_of(sample: TrainingSample) -> np.ndarray:
    """All of its routing, [L, width]."""
    assert sample.routing is not None
    return sample.routing.read(np.arange(len(sample.tokens)))


def routed(sample: TrainingSample, rows: np.ndarray, **fields: object) -> TrainingSample:
    """The sample with another routing."""
    routing = RecordedRouting(SHAPE, rows, len(rows), "a sample")
    return dataclasses.replace(sample, routing=routing, **fields)


def learner_of(model: Path, **update: object) -> PolicyLearner:
    settings = {"precision": "fp32", "threads": 1, "learning_rate": 1e-3, **update}
    algorithm = AlgorithmConfig.model_validate({"kl": {"placement": "none", "coefficient": 0}})
    return PolicyLearner(
        ModelConfig(path=str(model)), UpdateConfig.model_validate(settings), algorithm, iterations=4
    )


def mismatch(learner: PolicyLearner, samples: Sequence[TrainingSample]) -> float:
    """The mean distance of the trainer's log-probs from the engine's, in nats."""
    scores = learner.score(samples)
    apart = [
        np.abs(score - sample.rollout_logprobs)[sample.loss_mask == 1]
        for score, sample in zip(scores, samples, strict=True)
    ]
    return float(np.concatenate(apart).mean())


def test_every_token_but_the_last_is_recorded_over_all_turns(
    samples: list[TrainingSample],
) -> None:
    assert any(np.count_nonzero(np.diff(sample.loss_mask) == 1) > 1 for sample in samples)
    for sample in samples:
        assert sample.routing is not None
        assert sample.routing.read_bytes == 0
        places = rows_of(sample).reshape(len(sample.tokens), SHAPE.layers, SHAPE.chosen)
        assert np.array_equal(sample.routing.hashes, SHAPE.hashes(places))
        assert (places[:-1] < SHAPE.experts).all()
        assert (places[:-1, :, 0] != places[:-1, :, 1]).all()
        # No pass had the token that ended the episode.
        assert (places[-1] == SHAPE.unrecorded).all()


def test_replayed_routing_is_the_engines_and_one_token_off_is_seen(
    model: Path, samples: list[TrainingSample]
) -> None:
    learner = learner_of(model)
    replayed = mismatch(learner, samples)
    assert replayed < 2e-6
    moved = [routed(sample, np.roll(rows_of(sample), 1, axis=0)) for sample in samples]
    assert mismatch(learner, moved) > 0.05


def test_routers_that_have_moved_are_told_and_get_gradients(
    model: Path, samples: list[TrainingSample]
) -> None:
    """Replay under other routers: the experts stay those that were played."""
    learner = learner_of(model)
    still = learner.update(samples, iteration=0)
    assert still["routing_changed_share"] == still["routing_changed_share_max"] == 0.0
    assert still["expert_load_max"] >= still["expert_load"] > 1.0
    before = {name: weight.clone() for name, weight in learner.named_weights().items()}
    with torch.no_grad():
        for name, parameter in learner.named_parameters():
            if name.endswith("gate.weight"):
                parameter.add_(0.1 * torch.randn(parameter.shape))
                before[name] = parameter.detach().clone()
    metrics = learner.update(samples, iteration=1)
    assert 0.0 < metrics["routing_changed_share"] <= metrics["routing_changed_share_max"] < 1.0
    for name, weight in learner.named_weights().items():
        if "mlp" in name:
            moved = (weight - before[name]).abs()
            # Every expert that was played, and every router.
            assert moved.flatten(1).amax(dim=1).count_nonzero() > SHAPE.experts // 2, name
    # Without a record the routers choose by themselves, and are counted all the same.
    alone = [dataclasses.replace(sample, routing=None) for sample in samples]
    metrics = learner.update(alone, iteration=2)
    assert "routing_changed_share" not in metrics
    assert metrics["expert_load"] > 1.0


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_packed_and_shared_prefixes_train_as_single_samples(
    model: Path, samples: list[TrainingSample], checkpointing: str
) -> None:
    """One sample's routing parts from the others' within the prefix that they share."""
    longest = max(samples, key=lambda sample: len(sample.tokens))
    tokens, routing = longest.tokens.copy(), rows_of(longest)
    tokens[-2:] = tokens[:2]
    routing[5] = (routing[5] + 1) % SHAPE.experts
    alike = [
        longest,
        dataclasses.replace(longest, tokens=tokens, advantages=-longest.advantages, sample_id=90),
        routed(longest, routing, sample_id=91),
    ]
    sizes = [pack([alike[0], each], range(2)).tokens.size for each in alike[1:]]
    assert sizes == [len(tokens) + 2, 2 * len(tokens)]
    mixed = [*alike, *samples]
    weights, shares = [], []
    for tokens in (1, 100_000):
        learner = learner_of(
            model, max_tokens_per_microbatch=tokens, activation_checkpointing=checkpointing
        )
        # Live routers are others, so that what is computed again must be told, too.
        with torch.no_grad():
            for name, parameter in learner.named_parameters():
                if name.endswith("gate.weight"):
                    parameter.copy_(parameter.flip(0))
        metrics = learner.update(mixed, iteration=0)
        shares.append(metrics["shared_prefix_share"])
        weights.append(learner.named_weights())
        assert metrics["routing_changed_share"] > 0.1
    assert shares[0] == 0.0
    assert shares[1] > 0.1
    for name, weight in weights[0].items():
        torch.testing.assert_close(weight, weights[1][name], atol=1e-5, rtol=0, msg=name)


def test_off_and_dense_models_have_no_column(model: Path, tmp_path: Path) -> None:
    rows = played(tmp_path / "off", model, record_routing="off")
    assert "routing" not in rows[0]


def test_a_routing_of_another_model_is_a_damaged_shard() -> None:
    rows = np.array([[0, 1, 2, 3], [0, 1, 2, 8]], np.uint8)
    routing = RecordedRouting(SHAPE, rows, 2, "sample 7", SHAPE.hashes(rows))
    assert routing.read(np.array([0])).tolist() == [[0, 1, 2, 3]]
    with pytest.raises(RoutingError, match=r"sample 7 names expert 8 for token 1.*model has 8"):
        routing.read(np.array([1]))
    with pytest.raises(RoutingError, match=r"has 8 numbers for 3 tokens, the model needs 12"):
        RecordedRouting(SHAPE, rows.reshape(-1), 3, "sample 7")
    with pytest.raises(RoutingError, match="names expert -2 for token 0 in routed layer 1"):
        RecordedRouting(RoutingShape(2, 1, 300), np.array([7, -2], np.int16), 1, "sample 7")
    assert RoutingShape(1, 8, 256).dtype == "uint8"
    assert RoutingShape(1, 8, 257).dtype == RoutingShape(1, 1, 256).dtype == "int16"


@pytest.mark.parametrize(
    ("family", "layers"),
    [
        *(("Mixtral", 2), ("Olmoe", 2), ("Glm4Moe", 1), ("DeepseekV3", 1)),
        # Those that are handed the bias of the choice, whose matrix is a layer of its own, that
        # name the experts first, and that hold a bias.
        *(("MiniMaxM2", 2), ("Afmoe", 1), ("GraniteMoe", 2), ("Ernie4_5_Moe", 1)),
    ],
)
def test_every_family_makes_its_weights_of_what_it_is_told(family: str, layers: int) -> None:
    """Replayed choices repeat the logits bit for bit; others change them from their token on."""
    model = build(family).eval()
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        routers = routers_of(model)
        assert routers is not None
        experts = routers.shape.experts
        assert routers.shape == RoutingShape(layers, 2, experts)
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.ndim > 1 or len(tensor) == experts:
                tensor.normal_(0, 0.2)
        plain = model(tokens).logits
        model(tokens)
        live = routers.live()

        def under(chosen: torch.Tensor) -> torch.Tensor:
            routers.choose(chosen.flatten(1).to(torch.uint8))
            logits: torch.Tensor = model(tokens).logits
            return logits

        assert torch.equal(under(live), plain)
        torch.testing.assert_close(under(live.flip(2)), plain, atol=1e-5, rtol=0)
        unknown, other = live.clone(), live.clone()
        unknown[5], other[5] = 255, (live[5] + 1) % experts
        assert torch.equal(under(unknown), plain)
        moved = (under(other) - plain).abs()[0].amax(dim=1)
        assert moved[:5].max() < 1e-5
        assert moved[5] > 1e-3


@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss", "GraniteMoe", "JetMoe"])
def test_a_token_may_be_given_all_experts(family: str) -> None:
    """The scores of a router look like its weights then."""
    config = getattr(transformers, f"{family}Config")(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, head_dim=16,
        num_attention_heads=2, num_key_value_heads=1, kv_channels=16, num_local_experts=4,
        num_experts_per_tok=4,
    )  # fmt: skip
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    assert (routers_of(model) is None) == (family == "JetMoe")


def test_routers_that_draw_are_refused_unless_nothing_is_recorded(tmp_path: Path) -> None:
    """PhiMoE's add noise in training and send gradients past their choice."""
    model = build("Phimoe")
    assert routers_of(model) is None
    assert unread_routers(model) == ["PhimoeTopKRouter"]
    model.save_pretrained(tmp_path / "phimoe")
    with pytest.raises(ConfigError, match=r"(?s)has routers choose .* rollout.record_routing=off"):
        asyncio.run(TorchEngine(tmp_path / "phimoe", record_routing=True).start())
    engine = TorchEngine(tmp_path / "phimoe")
    asyncio.run(engine.start())
    assert engine.routing is None
