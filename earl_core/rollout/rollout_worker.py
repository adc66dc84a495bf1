"""The rollout worker: owns one engine and plays the share of the episodes that it is dealt.

It runs in a worker group of one rank; several engines are several groups. Everything that goes in
and comes out is JSON: weights and samples stay in shared memory, only their manifests pass. torch,
transformers and vllm are imported when the engine is built, not before.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from earl_core.config.environment import EnvironmentConfig
from earl_core.environments.base import Message
from earl_core.experience.probe import PROBE, Places, probed_episodes
from earl_core.experience.scoring import Scorer
from earl_core.rollout import rollout_stats
from earl_core.rollout.engine_worker import playing
from earl_core.rollout.engines.engine import GenerationRequest
from earl_core.rollout.episode_player import PlaySettings
from earl_core.rollout.errors import ContextOverflow, EngineLost
from earl_core.rollout.group_worker import GroupWorker
from earl_core.rollout.measure_decoding import SyntheticLoad, measure_decoding
from earl_core.rollout.mixture import Draw, evaluation_specs, suite_specs
from earl_core.rollout.pass_rates import count_passes
from earl_core.rollout.rollout_load import LoadMeter
from earl_core.rollout.rollout_stats import RolloutStats
from earl_core.run.run_stores import run_store
from earl_core.system import fault_points
from earl_core.system.memory import (
    OutOfMemory,
    give_back_free_memory,
    guarded,
    reset_peaks,
    resident_peak_bytes,
)
from earl_core.trajectory.samples import Episode, EpisodeSpec, rollout_rows
from earl_core.trajectory.schema import ROLLOUT_SCHEMA, with_routing


class RolloutWorker(GroupWorker):
    """The rank of a `rollout` worker group.

    Whatever generates takes the `weights` of `ensure`, since the worker may be a fresh one; without
    them the last `ensure` counts. It raises `OutOfMemory` of stage `rollout`, and `ContextOverflow`
    where the engine's context ends before the model's. A lost engine is built by the next `ensure`.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        log, here = self._context.log_path, self._context.here
        self._scorer = Scorer(self._config, log, self._run_directory, here)

    @playing
    async def rollout(
        self,
        groups: Sequence[int],
        *,
        share: int = 0,
        of_prompts: int | None = None,
        draws: Sequence[Draw] | None = None,
        shards_of: str = "rollout",
        probe: Places | None = None,
    ) -> dict[str, Any]:
        """Play the call's iteration's episodes and publish their samples as a shard.

        groups: the prompts' indices in the run, in the order in which they begin; episode_id =
        group * group_size + k. share, shards_of: number and beginning of the shard's name.
        of_prompts: how many prompts the iteration has, if more than these. draws: what each prompt
        plays, where the run has several environments. probe: what environments replay.
        Returns `shards` (entries for the manifest), `tally`, a dumped
        `RolloutStats`, and of a probe an `Asked`. Raises `RolloutFailed` when too many episodes
        failed.
        """
        config = self._config
        iteration = self._context.iteration or 0
        size = config.rollout.group_size
        draws = [("", group) for group in groups] if draws is None else draws
        specs = [
            spec
            for group, drawn in zip(groups, draws, strict=True)
            for spec in self._specs(group, drawn, iteration)
        ]
        whole = (of_prompts or len(groups)) * size
        settings = self._settings(config.rollout.temperature, whole)
        episodes, tally = await self._play(specs, settings, config.played)
        routing = self._ready()[0].routing
        if whole == len(specs):
            acts = config.guard == "act"
            rollout_stats.check_failures(tally, config.rollout.max_failed_share, acts)
        with guarded("rollout", "writing the samples"):
            fault_points.point(f"rollout.played{min(groups, default=0)}", iteration)
            entry = run_store(self._run_directory, config).publish(
                stage=shards_of,
                iteration=iteration,
                rank=share,
                schema=with_routing(ROLLOUT_SCHEMA, routing),
                rows=rollout_rows((e for e in episodes if not e.failed), ROLLOUT_SCHEMA, routing),
            )
        fault_points.point(f"rollout.sealed{share}", iteration)
        told = {"shards": [entry.model_dump(mode="json")], "tally": tally.model_dump(mode="json")}
        if probe:
            probed = probed_episodes(self._run_directory, probe)
            replayed = await self._unless_cancelled(
                self._pools.replay(config.played, probed, settings.max_live_episodes)
            )
            told[PROBE] = replayed.model_dump(mode="json")
        return told

    @playing
    async def evaluate(
        self,
        episodes: int,
        temperature: float | None = None,
        *,
        first: int = 0,
        of_episodes: int | None = None,
    ) -> dict[str, Any]:
        """Play held-out episodes, one for each prompt, and train on none.

        Several environments have parts by the weights of the run file. All iterations play the same
        prompts with the same seeds, so that curves compare like with like. Reward functions score
        them, too. temperature: None as in the rollout, 0 greedy. first: where a share of
        `of_episodes` begins. Returns `tally` as `rollout` does.
        """
        config = self._config
        specs = evaluation_specs(config, range(first, first + episodes))
        settings = self._settings(temperature, of_episodes)
        found, tally = await self._play(specs, settings, config.evaluated)
        if config.reward.functions:
            await self._unless_cancelled(self._scorer.rate(found, of_episodes or episodes))
            tally = RolloutStats.of(found, tally.load)
        return {"tally": tally.model_dump(mode="json")}

    @playing
    async def play_suite(
        self, label: str, prompts: int, *, first: int = 0, of_prompts: int | None = None
    ) -> dict[str, Any]:
        """Play every attempt at a part of a suite's prompts; as `evaluate`, with `passes`. The
        functions that the suite names score them."""
        (suite,) = (each for each in self._config.evaluation.suites if each.label == label)
        specs = suite_specs(suite, self._config.seed, range(first, first + prompts))
        of_episodes = (of_prompts or prompts) * suite.attempts
        settings = self._settings(suite.temperature, of_episodes)
        episodes, tally = await self._play(specs, settings, {label: suite})
        if suite.scored_by:
            scoring = self._scorer.rate(episodes, of_episodes, suite.scored_by)
            await self._unless_cancelled(scoring)
            tally = RolloutStats.of(episodes, tally.load)
        tally.passes = count_passes(episodes, suite.passing_return)
        return {"tally": tally.model_dump(mode="json")}

    @playing
    async def play_one(
        self, prompt: int, seed: int, temperature: float | None = None, environment: str = ""
    ) -> dict[str, Any]:
        """Play one episode and return its transcript (see `rollout_stats.example`)."""
        spec = EpisodeSpec(prompt, prompt, prompt, seed, environment)
        played = self._config.played
        episodes, _ = await self._play([spec], self._settings(temperature), played)
        return rollout_stats.example(episodes[0])

    @playing
    async def answer(
        self, messages: list[Message], seed: int, temperature: float | None = None
    ) -> dict[str, Any]:
        """The model's next answer to a person: {"text", "tokens"}."""
        engine, chat = self._ready()
        settings = self._settings(temperature)
        request = GenerationRequest(
            sequence_id=seed,
            tokens=chat.first_prompt(messages),
            max_tokens=settings.max_tokens_per_turn,
            temperature=settings.temperature,
            seed=seed,
            stop_token_ids=chat.stop_token_ids,
            ends=chat.ends,
        )
        (completion,) = await engine.generate([request])
        engine.finish([seed])
        longest, positions = engine.max_model_len, settings.positions or 0
        if completion.finish_reason == "model_context" and longest < positions:
            raise ContextOverflow(max(longest, len(request.tokens)) + 1, longest, positions)
        return {"text": chat.text_of(completion.tokens), "tokens": len(completion.tokens)}

    @playing
    async def serve(self, port: int, key: str, temperature: float | None = None) -> dict[str, Any]:
        """Answer OpenAI's clients that know the key, until the call is cancelled.

        Budgets are those of the requests and the engine's context, beyond which a request is
        refused: nobody is there to build a longer one.
        """
        from earl_core.rollout.gateway.gateway import Gateway

        engine, chat = self._ready()
        settings = replace(
            self._settings(temperature),
            max_turns=sys.maxsize,
            max_tokens_per_turn=None,
            max_tokens_per_episode=None,
            positions=None,
            public=None,
        )
        async with Gateway(engine, chat, settings, LoadMeter(0), port) as gateway:
            await gateway.stand(key, self._context.cancelled.is_set)
        return {}

    @playing
    async def measure(
        self, context: int, requests: int, generated: int, seconds: float
    ) -> dict[str, float]:
        """Measure the decoding of synthetic sequences, as `measure_decoding.measure_decoding`
        does."""
        engine, load = self._ready()[0], SyntheticLoad(context, requests, generated, seconds)
        try:
            return await measure_decoding(engine, self._config, load, self._context.cancelled)
        except (EngineLost, OutOfMemory):
            await self._drop_engine()
            raise

    async def close(self) -> None:
        """End the engine, and the processes of environments and reward functions."""
        await self._drop_engine()
        await self._pools.close()
        await self._scorer.close()

    async def _play(
        self,
        specs: Sequence[EpisodeSpec],
        settings: PlaySettings,
        environments: Mapping[str, EnvironmentConfig],
    ) -> tuple[list[Episode], RolloutStats]:
        engine, chat = self._ready()
        meter = LoadMeter(len(specs), self._context.report)
        meter.progressed()
        reset_peaks(self._processes())
        playing = self._pools.play(engine, chat, environments, specs, settings, meter)
        try:
            episodes = await self._unless_cancelled(playing)
            meter.progressed(last=True)
        except (EngineLost, OutOfMemory):
            await self._drop_engine()
            raise
        meter.peak_memory_bytes = resident_peak_bytes(self._processes())
        give_back_free_memory()
        return episodes, RolloutStats.of(episodes, meter)
