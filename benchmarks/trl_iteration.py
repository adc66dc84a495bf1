"""The peer's side of `benchmarks.iteration`: TRL's GRPOTrainer with a `rollout_func` of its own.

Run by `.venv-trl/bin/python` with one argument, a JSON file; writes one JSON line per iteration to
the file that it names. The game and the chat tokenizer are EARL's, so that both sides play the
same; sampling, batching, padding, the loss and the optimizer are TRL's and transformers'.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.trl_rollout import Colocated, Forward, Player, Sampler, play
from earl_core.environments.registry import create
from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.trajectory.samples import derive_seed


class Recorder(TrainerCallback):
    """One line per optimizer step: wall seconds from begin to begin, and what the rollout took."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._started = 0.0
        self.rollout: dict[str, float] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        line = {"iteration": state.global_step - 1, "seconds": time.perf_counter() - self._started}
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({**line, **self.rollout}) + "\n")


class Rollout:
    """TRL's `rollout_func`: all live games move together, turn by turn."""

    def __init__(self, settings: dict[str, Any], chat: ChatTokenizer, recorder: Recorder) -> None:
        self._settings = settings
        self._chat = chat
        self._recorder = recorder
        self._iteration = 0
        self._generator: Any = None

    def __call__(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        started = time.perf_counter()
        settings = self._settings
        members: dict[int, int] = {}
        players = []
        for prompt in prompts:
            group = int(prompt[0]["content"])
            member = members[group] = members.get(group, -1) + 1
            episode = group * settings["group_size"] + member
            seed = derive_seed(settings["seed"], self._iteration, "rollout", episode)
            environment = create(settings["environment"], settings["options"])
            players.append(Player(environment, self._chat, group, seed, settings["max_turns"]))
        if len(players) != settings["prompts"] * settings["group_size"]:
            raise RuntimeError(f"TRL asked for {len(players)} games: its batch sizes do not fit")
        sampler = self._sampler(trainer)
        play(players, sampler, settings["temperature"], settings["max_tokens_per_turn"])
        self._iteration += 1
        self._recorder.rollout = {
            "rollout_seconds": time.perf_counter() - started,
            "games": len(players),
            "tokens": sum(len(player.tokens) for player in players),
            "trained_tokens": sum(sum(player.mask) for player in players),
            "return": sum(player.reward for player in players) / len(players),
        }
        return {
            "prompt_ids": [player.tokens[: player.prompt_length] for player in players],
            "completion_ids": [player.tokens[player.prompt_length :] for player in players],
            "env_mask": [player.mask[player.prompt_length :] for player in players],
            "logprobs": None,
            "game_reward": [player.reward for player in players],
        }

    def _sampler(self, trainer: GRPOTrainer) -> Sampler:
        if self._settings["use_vllm"]:
            return Colocated(trainer.vllm_generation.llm)
        return Forward(self._weights(trainer), self._settings["cache"])

    def _weights(self, trainer: GRPOTrainer) -> Any:
        """The model that plays: the trained one, or a bfloat16 copy of it."""
        trained = trainer.accelerator.unwrap_model(trainer.model)
        if not self._settings["bf16_copy"]:
            return trained
        if self._generator is None:
            self._generator = AutoModelForCausalLM.from_config(
                trained.config, dtype=torch.bfloat16
            ).eval()
        with torch.no_grad():
            pairs = zip(self._generator.parameters(), trained.parameters(), strict=True)
            for own, other in pairs:
                own.copy_(other)
        return self._generator


def game_reward(game_reward: list[float], **_: Any) -> list[float]:
    """Hands through what the games paid."""
    return game_reward


def grpo_arguments(settings: dict[str, Any], output: Path) -> GRPOConfig:
    """TRL's arguments for one optimizer step per iteration, all games of it trained once."""
    games = settings["prompts"] * settings["group_size"]
    device_batch = min(settings["device_batch"], games)
    return GRPOConfig(
        output_dir=str(output),
        use_cpu=not torch.cuda.is_available(),
        bf16=settings["precision"] == "bf16",
        per_device_train_batch_size=device_batch,
        gradient_accumulation_steps=games // device_batch,
        num_generations=settings["group_size"],
        max_steps=settings["iterations"],
        learning_rate=settings["learning_rate"],
        lr_scheduler_type="constant",
        adam_beta1=settings["beta1"],
        adam_beta2=settings["beta2"],
        adam_epsilon=settings["epsilon"],
        weight_decay=settings["weight_decay"],
        max_grad_norm=settings["max_grad_norm"],
        temperature=settings["temperature"],
        loss_type="dapo",  # tokens weigh alike over the whole batch, as in EARL's token_mean
        beta=0.0,
        epsilon=0.2,
        gradient_checkpointing=settings["gradient_checkpointing"],
        dataloader_pin_memory=False,
        shuffle_dataset=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=settings["seed"],
        use_vllm=settings["use_vllm"],
        vllm_mode="colocate",
        vllm_max_model_length=1024,
        vllm_importance_sampling_correction=False,
    )


def tokenizer_of(settings: dict[str, Any]) -> Any:
    """The model's tokenizer, which pads."""
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def trainer_of(
    settings: dict[str, Any],
    output: Path,
    tokenizer: Any,
    rollout: Callable[..., dict[str, Any]],
    callback: TrainerCallback,
) -> GRPOTrainer:
    """The trainer with the settings of the comparison."""
    rows = [
        [{"role": "user", "content": str(prompt)}]
        for prompt in range(settings["prompts"] * settings["iterations"])
    ]
    return GRPOTrainer(
        # Full-precision weights, as on EARL's side; bfloat16, if any, by autocast, as TRL has it.
        model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
        reward_funcs=game_reward,
        args=grpo_arguments(settings, output),
        train_dataset=Dataset.from_dict({"prompt": rows}),
        processing_class=tokenizer,
        callbacks=[callback],
        rollout_func=rollout,
    )


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(settings["threads"])
    tokenizer, recorder = tokenizer_of(settings), Recorder(Path(settings["results"]))
    chat = ChatTokenizer(tokenizer, settings["answer_prefix"], ())
    rollout = Rollout(settings, chat, recorder)
    output = Path(sys.argv[1]).parent / "trl-output"
    trainer_of(settings, output, tokenizer, rollout, recorder).train()


if __name__ == "__main__":
    main()
