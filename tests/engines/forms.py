"""Answers that are one of a few texts, and what the engines and the trainer should say of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from earl_core.config.algorithm import AlgorithmConfig
from earl_core.config.model import ModelConfig
from earl_core.config.update import UpdateConfig
from earl_core.learner.data.packing import TrainingSample
from earl_core.learner.policy_learner import PolicyLearner
from earl_core.pretrained.grammars import Held, grammars_of
from earl_core.rollout.chat.call_grammars import either, pattern, text
from earl_core.rollout.engines.engine import Completion
from earl_core.trajectory.forms import Form
from tests.engines.models import VOCABULARY, read
from tests.rollout.chat_models import CHATML, char_tokenizer

TOKENIZER = char_tokenizer(CHATML)
STOPS = tuple(TOKENIZER.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"]))
TEXTS = ("yes", "yellow", "no", "nothing at all", "maybe")
CHOICE = Form(json.dumps({"type": "structural_tag", "format": either(*map(text, TEXTS))}), STOPS)

DEAD_END = Form(json.dumps({"type": "structural_tag", "format": pattern(r"ye[^\d\D]s")}), STOPS)
"""No token goes on after its second one."""


def said(answer: Completion) -> str:
    return str(TOKENIZER.decode([each for each in answer.tokens if each not in STOPS]))


def allowed(before: str) -> list[int]:
    """The tokens that may stand after a beginning of one of the texts, by the texts alone."""
    after = {each[len(before)] for each in TEXTS if each.startswith(before) and each != before}
    return [TOKENIZER.convert_tokens_to_ids(each) for each in after] + (
        list(STOPS) if before in TEXTS else []
    )


@torch.inference_mode()
def masked_logprobs(
    directory: Path, prompt: Sequence[int], answer: Sequence[int], temperature: float
) -> list[float]:
    """By one forward pass of transformers, in float64, over the allowed tokens only."""
    logits = read(directory)(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    found = []
    for place, token in enumerate(answer):
        row = torch.full((VOCABULARY,), -torch.inf, dtype=torch.float64)
        may = allowed(str(TOKENIZER.decode(answer[:place])))
        row[may] = logits[place, may].double() / (temperature or 1.0)
        found.append(float(row.log_softmax(-1)[token]))
    return found


def trainer_logprobs(
    directory: Path, asked: Sequence[tuple[Sequence[int], Completion, Form | None]], at: float
) -> list[np.ndarray]:
    """The learner's, of the sampled tokens, under the weights of the directory. at: temperature."""
    model = ModelConfig(path=str(directory))
    update = UpdateConfig(precision="fp32", compile=False)
    learner = PolicyLearner(model, update, AlgorithmConfig(), temperature=at)
    rows = [np.array([*prompt, *answer.tokens], np.int32) for prompt, answer, _ in asked]
    held = [
        Held(row, [] if form is None else [(form, np.arange(len(prompt), len(row)))])
        for row, (prompt, _, form) in zip(rows, asked, strict=True)
    ]
    samples = []
    for row, (prompt, *_), masks in zip(
        rows, asked, grammars_of(directory, False).masks(held), strict=True
    ):
        trained = (np.arange(len(row)) >= len(prompt)).astype(np.uint8)
        unknown = np.zeros(len(row), np.float32)
        samples.append(TrainingSample(row, trained, unknown, masks=masks))
    scored = learner.score(samples)
    return [row[each.loss_mask == 1] for row, each in zip(scored, samples, strict=True)]
