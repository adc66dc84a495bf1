"""What a sample a turn costs the update, with what its samples share computed once and not.

    python -m benchmarks.turn_samples --markdown benchmarks/results/turn_samples.md

Chat templates that drop earlier reasoning (Qwen3's, DeepSeek's) make n samples of an episode of n
turns. The same episodes are trained as one sample each, as templates that keep everything have
them; as a sample a turn; and as a sample a turn that shares nothing, because its first token is no
other's. The model is a small one with random weights: what counts is how much it computes.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from earl_core.config.algorithm import AlgorithmConfig
from earl_core.config.model import ModelConfig
from earl_core.config.update import UpdateConfig
from earl_core.learner.data.packing import TrainingSample
from earl_core.learner.policy_learner import PolicyLearner
from tools.harness import Report, Row, median, parser, publish

FORMS = ("a sample an episode", "a sample a turn", "a sample a turn, nothing shared")
_VOCABULARY, _GROUP = 4096, 4
_PROMPT, _OBSERVATION, _ANSWER = 200, 60, 20


def samples(form: str, turns: int, reasoning: int, episodes: int) -> list[TrainingSample]:
    """The episodes in one of the forms. Numbers of tokens: a prompt of `_PROMPT`, then in each turn
    `reasoning` and `_ANSWER` that are trained, and `_OBSERVATION` after it."""
    chance = np.random.default_rng(1)
    made: list[TrainingSample] = []

    def drawn(count: int) -> list[int]:
        return chance.integers(episodes * turns, _VOCABULARY, count).tolist()

    for episode in range(episodes):
        if episode % _GROUP == 0:
            prompt = drawn(_PROMPT)
        standing, mask = list(prompt), [0] * len(prompt)
        for turn in range(turns):
            thought, answer, observation = map(drawn, (reasoning, _ANSWER, _OBSERVATION))
            tokens = [*standing, *thought, *answer]
            if form != FORMS[0]:
                if form == FORMS[2]:
                    tokens[0] = episode * turns + turn
                trained = [0] * len(standing) + [1] * (len(tokens) - len(standing))
                made.append(_sample(tokens, trained, episode, len(made)))
                thought = []  # is dropped from what follows
            mask += [0] * (len(standing) - len(mask)) + [1] * (len(thought) + len(answer))
            standing += [*thought, *answer, *observation]
        if form == FORMS[0]:
            mask += [0] * (len(standing) - len(mask))
            made.append(_sample(standing[:-_OBSERVATION], mask[:-_OBSERVATION], episode, len(made)))
    return made


def _sample(tokens: list[int], mask: list[int], episode: int, number: int) -> TrainingSample:
    trained = np.array(mask, dtype=np.uint8)
    return TrainingSample(
        tokens=np.array(tokens, dtype=np.int32),
        loss_mask=trained,
        rollout_logprobs=trained * np.float32(-8.0),
        advantages=trained * np.float32((-1.0) ** episode),
        episode_id=episode,
        group_id=episode // _GROUP,
        sample_id=number,
    )


def main() -> None:
    options = _options()
    report = Report("turn_samples", "A sample a turn: tokens and processor seconds of an update")
    with tempfile.TemporaryDirectory(prefix="earl-turn-samples-") as directory:
        learner = _learner(Path(directory))
        for turns, reasoning in itertools.product(options.turns, options.reasoning):
            report.rows += _rows(learner, turns, reasoning, options)
    for headline, form in (("turn_samples_computed", 1), ("turn_samples_unshared_computed", 2)):
        shares = [
            row["computed over the first"] for row in report.rows if row["form"] == FORMS[form]
        ]
        report.headline[headline] = max(float(each or 0) for each in shares)
    report.notes += [
        f"{options.episodes} episodes in groups of {_GROUP}; tokens: {_PROMPT} of the prompt, then "
        f"in each turn the reasoning, {_ANSWER} of the answer, {_OBSERVATION} of the observation.",
        "Computed: tokens that go through the model. CPU seconds, of all threads together: median "
        f"of {options.rounds} updates, the forms in turn.",
        "The headlines are the worst of the tokens. A small model's seconds are in good part work "
        "for each sample and not for each token.",
        "A sample an episode trains on other prompts than a sample a turn: with all earlier "
        "reasoning in them.",
    ]
    publish(report, options)


def _rows(learner: PolicyLearner, turns: int, reasoning: int, options: Any) -> list[Row]:
    batches = {form: samples(form, turns, reasoning, options.episodes) for form in FORMS}
    seconds: dict[str, list[float]] = {form: [] for form in FORMS}
    computed = dict.fromkeys(FORMS, 0.0)
    for number in range(options.rounds + 1):
        for form, batch in batches.items():
            began = time.process_time()
            found = learner.update(batch, iteration=number)
            if number:  # the first one warms up
                seconds[form].append(time.process_time() - began)
            tokens = sum(len(each.tokens) for each in batch)
            computed[form] = tokens * (1 - found["shared_prefix_share"])
    first = FORMS[0]
    return [
        {
            "turns": turns,
            "reasoning": reasoning,
            "form": form,
            "samples": len(batches[form]),
            "tokens": sum(len(each.tokens) for each in batches[form]),
            "computed": round(computed[form]),
            "computed over the first": computed[form] / computed[first],
            "CPU s/update": median(seconds[form]),
            "CPU s over the first": median(seconds[form]) / median(seconds[first]),
        }
        for form in FORMS
    ]


def _learner(directory: Path) -> PolicyLearner:
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=_VOCABULARY, hidden_size=192, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=6, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return PolicyLearner(
        ModelConfig(path=str(directory)),
        UpdateConfig(precision="fp32", max_tokens_per_microbatch=8192, max_mismatch=None),
        AlgorithmConfig(),
        temperature=1.0,
        iterations=1000,
        seed=1,
    )


def _options() -> Any:
    made = parser(__doc__ or "")
    made.add_argument("--turns", type=int, nargs="+", default=[4, 16])
    made.add_argument("--reasoning", type=int, nargs="+", default=[50, 400])
    made.add_argument("--episodes", type=int, default=4)
    made.add_argument("--rounds", type=int, default=2)
    options = made.parse_args()
    if options.quick:
        options.turns, options.episodes, options.rounds = [4], 4, 1
    return options


if __name__ == "__main__":
    main()
