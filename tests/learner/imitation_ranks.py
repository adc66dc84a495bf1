"""What `test_imitation` does in several ranks: chats imitated on a mesh, and by a plain loop."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from earl_core.config.algorithm import AlgorithmConfig
from earl_core.config.imitation import ImitationConfig
from earl_core.config.model import ModelConfig
from earl_core.config.update import UpdateConfig
from earl_core.environments.base import Message
from earl_core.imitation.chats import samples_of
from earl_core.learner.data.packing import TrainingSample
from earl_core.learner.parallel.mesh import UpdateMesh, create_mesh
from earl_core.learner.policy_learner import PolicyLearner
from earl_core.pretrained.model_directory import load_tokenizer
from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.tensors.slices import slices_of
from tests.learner.cuts import mesh_of
from tests.learner.helpers import eager_model, save_model
from tests.rollout.chat_models import CHATML, char_tokenizer

STEPS, RATE, DECAY, EPSILON, CLIP = 3, 0.03, 0.1, 1e-2, 0.5
MESHES = {1: [mesh_of(1, 1, 1, 1)], 4: [mesh_of(2, 2, 1, 1), mesh_of(1, 2, 1, 2)]}

_WORDS = ["board", "left", "centre", "corner", "win", "block", "free", "row", "the", "move"]


def chats() -> list[list[Message]]:
    """Of one to three answers, some of which begin alike."""
    words = np.random.default_rng(5)
    found: list[list[Message]] = []
    for number in range(11):
        messages: list[Message] = [{"role": "system", "content": "You play. " * 4}]
        for _ in range(1 + number % 3):
            for role in ("user", "assistant"):
                said = " ".join(words.choice(_WORDS, int(words.integers(1, 5))))
                messages.append({"role": role, "content": said})
        found.append(messages)
    return found


def prepare(scratch: Path) -> None:
    """Write a model with a tokenizer and a template, and what a plain loop makes of it."""
    tokenizer = char_tokenizer(CHATML)
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    save_model(LlamaForCausalLM(config), scratch / "model")
    tokenizer.save_pretrained(scratch / "model")
    losses, norms, weights = _plain(scratch / "model")
    numbers = {"losses": torch.tensor(losses), "norms": torch.tensor(norms)}
    save_file({**weights, **numbers}, scratch / "plain.safetensors")


def _plain(directory: Path) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Cross entropy of the assistant's words and their ends: transformers' template and model,
    torch's AdamW, a chat at a time, in float64."""
    model = eager_model(directory).double()
    tokenizer = load_tokenizer(ModelConfig(path=str(directory)))
    matrices = [each for each in model.parameters() if each.ndim >= 2]
    vectors = [each for each in model.parameters() if each.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}],
        lr=RATE,
        betas=(0.9, 0.95),
        eps=EPSILON,
    )
    losses, norms = [], []
    for _ in range(STEPS):
        total, count = torch.zeros((), dtype=torch.float64), 0
        for messages in chats():
            text = tokenizer.apply_chat_template(messages, tokenize=False)
            encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
            answers = [each.span(1) for each in re.finditer(r"assistant\n(.*?<\|im_end\|>)", text)]
            tokens = torch.tensor(encoded["input_ids"])
            logprobs = torch.log_softmax(model(input_ids=tokens[None]).logits[0], dim=-1)
            for at, (first, last) in enumerate(encoded["offset_mapping"]):
                if any(start <= first and last <= end for start, end in answers):
                    total, count = total - logprobs[at - 1, tokens[at]], count + 1
        optimizer.zero_grad()
        (total / count).backward()
        losses.append(float(total / count))
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    return losses, norms, {name: each.detach() for name, each in model.named_parameters()}


def samples(directory: Path) -> list[TrainingSample]:
    """The chats as a stage of demonstrations writes them, without log-probs of anybody."""
    chat = ChatTokenizer(load_tokenizer(ModelConfig(path=str(directory))))
    found = []
    for number, messages in enumerate(chats()):
        (sample,) = samples_of(chat, messages)
        found.append(
            TrainingSample(
                tokens=np.array(sample.tokens, dtype=np.int32),
                loss_mask=np.array(sample.loss_mask, dtype=np.uint8),
                rollout_logprobs=np.zeros(len(sample.tokens), dtype=np.float32),
                episode_id=number,
                group_id=number,
                sample_id=number,
            )
        )
    return found


IMITATION = ImitationConfig(data="chats.jsonl", iterations=STEPS, learning_rate=RATE)


def learner_of(
    directory: Path,
    mesh: UpdateMesh | None = None,
    imitation: ImitationConfig | None = IMITATION,
) -> PolicyLearner:
    """Its run plays at another temperature, with another rate, loss and penalties, later."""
    return PolicyLearner(
        ModelConfig(path=str(directory)),
        UpdateConfig(
            precision="fp32", learning_rate=1.0, weight_decay=DECAY, epsilon=EPSILON,
            warmup_iterations=4, max_grad_norm=CLIP, max_tokens_per_microbatch=256, compile=False,
        ),
        AlgorithmConfig(
            policy_loss="gspo",
            kl={"placement": "loss", "coefficient": 0.1},
            entropy_coefficient=0.1,
            importance_correction={"cap": 1.5},
        ),
        temperature=0.7,
        iterations=10 if imitation else 10 - STEPS,
        imitation=imitation,
        mesh=mesh,
    )  # fmt: skip


def compare(scratch: Path) -> dict[str, dict[str, float]]:
    """By mesh: the largest differences of losses, norms and weights from the plain loop's, relative
    where above 1; and how the losses fell."""
    torch.set_num_threads(1)
    found = {}
    plain, ranks = load_file(scratch.parent / "plain.safetensors"), int(os.environ["WORLD_SIZE"])
    for shape in MESHES[ranks]:
        mesh = create_mesh(shape)
        learner = learner_of(scratch.parent / "model", mesh)
        dealt = samples(scratch.parent / "model")[mesh.data_rank :: shape.data_parallel]
        told = [learner.update(dealt, iteration=iteration) for iteration in range(STEPS)]
        loss = np.array([metrics["loss"] for metrics in told])
        norm = np.array([metrics["grad_norm"] for metrics in told])
        weights = max(
            float((each.tensor.double() - plain[each.name][each.box.index]).abs().max())
            for each in slices_of(learner.named_weights())
            if each.tensor.numel()
        )
        found[str(shape)] = {
            "loss": _gap(loss, plain["losses"]),
            "norm": _gap(norm, plain["norms"]),
            "weights": weights,
            "shared": told[0]["shared_prefix_share"],
            "smallest norm": float(norm.min()),
            "fell": float(loss[0] - loss[-1]),
        }
        assert not {name for name in told[0] if "ratio" in name or "mismatch" in name}
        mesh.close()
    return found


def _gap(ours: np.ndarray, plain: torch.Tensor) -> float:
    theirs = plain.numpy()
    return float((np.abs(ours - theirs) / np.maximum(np.abs(theirs), 1.0)).max())
