"""One rollout or evaluation over several engines: what is played, and what comes of it.

Ids and seeds belong to the episodes, so nothing depends on how many engines there are or on who
plays what.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from earl_core.config import RunConfig
from earl_core.config.environment import SuiteConfig
from earl_core.control.dealing import Deal, contiguous, deal_by_length
from earl_core.control.engine_jobs import Job, Played, Share, run
from earl_core.control.guard_probe import probed_environments
from earl_core.control.prompt_waves import Wave
from earl_core.control.run_controller import RunController
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.dispatch import Manifest
from earl_core.experience.probe import of_probe
from earl_core.rollout import rollout_stats
from earl_core.rollout.mixture import Draw, draw
from earl_core.rollout.pass_rates import suite_results
from earl_core.rollout.rollout_stats import RolloutStats, merge

logger = logging.getLogger(__name__)


def play_rollout(
    controller: RunController,
    deployment: StageDeployment,
    iteration: int,
    weights: Manifest,
    stage: str,
    wave: Wave,
) -> dict[str, Any]:
    """Play an iteration's episodes, or a wave of them, under the name `stage`; `shards` in the
    order of their rows, `outputs`, `metrics`, `statistics` and the `tally`."""
    config = controller.config
    drawn, cursor = draw(config.mixture, wave.cursor, config.curriculum, wave.prompts)
    counted = drawn or [("", wave.first + item) for item in range(wave.prompts)]
    prompts, of_rows = controller.rows.of(iteration, counted, wave.began)

    def arguments(share: Share) -> dict[str, Any]:
        return {
            "draws": [prompts[item] for item in share.items],
            "groups": [wave.first + item for item in share.items],
            "share": share.number,
            "of_prompts": wave.before + wave.prompts,
            "shards_of": stage,
            "probe": probe if share.number == 0 else {},
        }

    # An iteration asks once, whatever it plays in waves.
    probe = {} if wave.before else probed_environments(controller, iteration)
    dealt = deal_of(controller, iteration, prompts, deployment.replicas)
    sent = arguments, weights.outputs["weights"]
    job = Job(stage, iteration, "rollout", wave.prompts, *sent, dealt)
    done, engines = run(controller, deployment, job)
    tally = merged(done)
    # A small wave may have a large share of failures: the iteration's is what counts.
    together = merge([[*wave.earlier, tally]])
    rollout_stats.check_failures(together, config.rollout.max_failed_share, config.guard == "act")
    return {
        "shards": [entry for played in done for entry in played.result["shards"]],
        "outputs": wave.outputs(cursor) | of_probe(played.result for played in done),
        "metrics": {
            **rollout_stats.rollout_metrics(tally),
            **engines.metrics(),
            **engines.probe,
            **of_rows,
        },
        "statistics": rollout_stats.selector_statistics(tally),
        "tally": tally,
    }


def deal_of(
    controller: RunController, iteration: int, prompts: Sequence[Draw], engines: int
) -> Deal:
    """How an iteration's prompts are dealt, by what the iterations have played that were finished
    when its rollout could begin. History that cannot be read costs a warning."""
    name = controller.config.rollout.deal
    if name == "contiguous" or engines == 1:
        return contiguous
    last = iteration - 1 - controller.config.schedule.staleness
    try:
        lengths = controller.past_lengths.expected(prompts, last)
    except Exception as error:
        told = f"prompts are dealt contiguously, because past episodes cannot be read: {error}"
        logger.warning("iteration %d: %s", iteration, told)
        controller.run.note(iteration, "rollout", told)
        return contiguous
    return deal_by_length(name, lengths, iteration, engines)


def play_evaluation(
    controller: RunController, deployment: StageDeployment, version: int, weights: Manifest
) -> dict[str, Any]:
    """Play the held-out episodes and the suites that are due; `outcomes` with 95 % Wilson
    intervals, `suites` by label, `metrics`."""
    settings = controller.config.evaluation
    episodes = settings.episodes_of(version)

    def arguments(share: Share) -> dict[str, Any]:
        return {
            "episodes": len(share.items),
            "temperature": settings.temperature,
            "first": share.first,
            "of_episodes": episodes,
        }

    job = Job("evaluation", version, "evaluate", episodes, arguments, weights.outputs["weights"])
    done, engines = run(controller, deployment, job)
    tally = merged(done)
    rollout_stats.check_failures(tally, controller.config.rollout.max_failed_share)
    results = rollout_stats.evaluation_results(tally)
    suites = suite_results(
        [
            (suite.label, suite.attempts, _play_suite(controller, deployment, version, suite, job))
            for suite in settings.suites
            if suite_is_due(controller.config, suite, version)
        ]
    )
    metrics = {**results["metrics"], **engines.metrics(), **suites["metrics"]}
    return {**results, **suites, "metrics": metrics}


def suite_is_due(config: RunConfig, suite: SuiteConfig, version: int) -> bool:
    """Tell whether an evaluation of this policy version plays the suite: the last one always
    does."""
    every = config.evaluation.every * suite.every
    return version == config.iterations or version % every == 0


def _play_suite(
    controller: RunController,
    deployment: StageDeployment,
    version: int,
    suite: SuiteConfig,
    evaluation: Job,
) -> RolloutStats:
    def arguments(share: Share) -> dict[str, Any]:
        return {
            "label": suite.label,
            "prompts": len(share.items),
            "first": share.first,
            "of_prompts": suite.prompts,
        }

    job = replace(evaluation, method="play_suite", items=suite.prompts, arguments=arguments)
    tally = merged(run(controller, deployment, job)[0])
    rollout_stats.check_failures(tally, controller.config.rollout.max_failed_share)
    return tally


def merged(done: list[Played]) -> RolloutStats:
    """One tally of what all engines played."""
    calls: dict[int, list[RolloutStats]] = {}
    for played in done:
        calls.setdefault(played.member, []).append(played.tally)
    return merge(calls[member] for member in sorted(calls))
