"""Settings of a run file that cannot work together."""

from __future__ import annotations

from collections.abc import Sequence

from earl_core.algorithms.advantages import ADVANTAGE_ESTIMATORS
from earl_core.algorithms.aggregation import AGGREGATIONS
from earl_core.algorithms.kl import KL_ESTIMATORS
from earl_core.algorithms.policy_losses import POLICY_LOSSES
from earl_core.config.algorithm import AlgorithmConfig
from earl_core.config.critic import CriticConfig
from earl_core.config.model import ModelConfig
from earl_core.config.rollout import RolloutConfig
from earl_core.config.update import UpdateConfig


def check_algorithm(algorithm: AlgorithmConfig, group_size: int, charged: bool) -> bool:
    """Raise `ValueError` for parts of an algorithm that contradict each other, or the size of a
    group. charged: some episode pays a KL penalty.

    Returns whether the loss accounts for the policy that sampled; one of somebody's own that cannot
    be imported here is trusted.
    """
    estimator = ADVANTAGE_ESTIMATORS.checked(algorithm.advantage)
    loss = POLICY_LOSSES.checked(algorithm.policy_loss)
    AGGREGATIONS.checked(algorithm.aggregation)
    KL_ESTIMATORS.checked({"name": algorithm.kl.estimator})
    if estimator is not None and estimator.needs_groups and group_size < 2:
        raise ValueError(
            f"algorithm.advantage {algorithm.advantage['name']!r} compares the episodes of a "
            f"group, so rollout.group_size must be at least 2, not {group_size}; "
            "`reinforce` and `reinforce_plus_plus` work with 1"
        )
    corrected = algorithm.importance_correction is not None
    if loss is not None and loss.from_rollout and corrected:
        raise ValueError(
            f"algorithm.policy_loss {algorithm.policy_loss['name']!r} corrects for the "
            "engine's log-probs itself, so algorithm.importance_correction would do it twice: "
            "leave it out"
        )
    if loss is not None and algorithm.from_rollout and not loss.to_old:
        raise ValueError(
            f"algorithm.policy_loss {algorithm.policy_loss['name']!r} has no ratio that could be "
            "to the policy that sampled: set algorithm.importance_correction.anchor to "
            "`recompute`, or choose a loss with one, such as `ppo_clip`"
        )
    if (algorithm.kl.placement == "none") == charged:
        raise ValueError(
            "algorithm.kl.placement and algorithm.kl.coefficient contradict each other: set "
            "placement to `loss` or `reward` and a positive coefficient (of an environment's "
            "own kl, too), or neither"
        )
    return corrected or loss is None or loss.from_rollout


def check_critic(
    critic: CriticConfig | None,
    algorithm: AlgorithmConfig,
    iterations: int,
    prompts: int,
    *,
    adapter: bool,
    imitates: bool,
) -> None:
    """Raise `ValueError` for an advantage estimator without the values that it needs, and for a
    critic that nobody asks or that has nothing to learn from.

    prompts: of an iteration. adapter: there is a `model.adapter`. imitates: the first iterations
    do.
    """
    estimator, name = ADVANTAGE_ESTIMATORS.checked(algorithm.advantage), algorithm.advantage["name"]
    if critic is None:
        if estimator is not None and estimator.needs_values:
            raise ValueError(
                f"algorithm.advantage {name!r} compares returns with the column `values`, which "
                "the stage `value` writes only in a run with a critic: add the section `critic` "
                "(`critic: {}` has its defaults), or choose an estimator without one, such as "
                "`grpo`"
            )
        return
    if estimator is not None and not estimator.needs_values:
        raise ValueError(
            f"critic is set, but algorithm.advantage {name!r} asks no critic: leave critic out, or "
            "set the estimator to `gae`"
        )
    if critic.warmup_iterations >= iterations:
        raise ValueError(
            f"critic.warmup_iterations ({critic.warmup_iterations}) leaves none of the "
            f"{iterations} iterations to train the policy: lower it, or raise iterations, which "
            "counts them too"
        )
    if (critic.minibatches or 1) > prompts:
        raise ValueError(
            f"critic.minibatches ({critic.minibatches}) exceeds rollout.prompts_per_iteration "
            f"({prompts}): each minibatch needs a prompt of its own"
        )
    if adapter:
        raise ValueError(
            "critic is a whole model that is trained, which is not supported beside model.adapter: "
            "leave the adapter out, or choose an estimator without a critic, such as `grpo`"
        )
    if imitates:
        raise ValueError(
            "critic learns from returns, which iterations that imitate have none of: imitate in a "
            "run of its own, and begin this one from it (model.from)"
        )


def check_balance(algorithm: AlgorithmConfig, model: ModelConfig, rollout: RolloutConfig) -> None:
    """Raise `ValueError` where the loss that balances experts has nothing to count, or to train."""
    if not algorithm.router_aux_loss_coef:
        return
    if rollout.record_routing == "off":
        raise ValueError(
            "algorithm.router_aux_loss_coef counts the experts that were recorded, but "
            "rollout.record_routing is `off`: set it to `auto`, or the coefficient to 0"
        )
    if model.freeze_routers:
        raise ValueError(
            "algorithm.router_aux_loss_coef trains routers, which model.freeze_routers keeps as "
            "they are: leave one of them out"
        )


def check_groups(
    algorithm: AlgorithmConfig, rollout: RolloutConfig, unrewarded: Sequence[str]
) -> None:
    """Raise `ValueError` where groups that score alike cannot leave the batch. unrewarded:
    environments whose episodes get no reward."""
    if not rollout.filters_groups:
        return
    estimator = ADVANTAGE_ESTIMATORS.checked(algorithm.advantage)
    if estimator is not None and not estimator.needs_groups:
        raise ValueError(
            f"rollout.alike_groups is `{rollout.alike_groups}`, but algorithm.advantage "
            f"{algorithm.advantage['name']!r} does not compare the episodes of a group, so groups "
            "that score alike teach it as much as others: leave alike_groups out, or choose an "
            "estimator of groups, such as `grpo`"
        )
    if unrewarded:
        raise ValueError(
            f"rollout.alike_groups is `{rollout.alike_groups}`, but no episode of the environment "
            f"{unrewarded[0]!r} gets a reward, so all of its groups would leave, and its `kl` with "
            "them: leave alike_groups out"
        )


def check_curriculum(environments: int, group_size: int) -> None:
    """Raise `ValueError` where the curriculum of a mixture has nothing to divide or compare."""
    if environments < 2 or group_size < 2:
        raise ValueError(
            "curriculum divides the prompts among several environments by how the episodes of a "
            "group differ: give two environments or more and a group_size of at least 2, or leave "
            "it out; that of the rows of a data set is environment.curriculum"
        )


def check_labels(what: str, labels: Sequence[str]) -> None:
    """Raise `ValueError` for a label that stands twice among these. what: the section's name."""
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        raise ValueError(f"{what} have the label {twice[0]!r} twice: give each its own")


def check_deal(rollout: RolloutConfig, kept: int | str) -> None:
    """Raise `ValueError` where prompts are dealt by past episodes that are not kept. kept:
    `tracking.keep_episodes`."""
    if rollout.deal != "contiguous" and kept == "none":
        raise ValueError(
            f"rollout.deal is `{rollout.deal}`, which goes by the lengths of past episodes, but "
            "tracking.keep_episodes is `none`: set it to `all`, or leave rollout.deal out"
        )


def check_drafts(rollout: RolloutConfig, deterministic: bool, adapter: bool) -> None:
    """Raise `ValueError` where drafts are not to be had. deterministic: `update.deterministic`.
    adapter: whether there is a `model.adapter`."""
    if rollout.drafts is None:
        return
    if rollout.engine != "torch" and adapter:
        raise ValueError(
            f"rollout.drafts is set, but on `{rollout.engine}` drafts were not shown to be exact "
            "beside a model.adapter: set rollout.engine to `torch`, or leave rollout.drafts out"
        )
    if deterministic:
        raise ValueError(
            "update.deterministic asks for the same bits, but with rollout.drafts log-probs are "
            "the same to rounding only, because an engine drafts by what it remembers and by the "
            "clock: leave one of them out"
        )


def check_sizes(rollout: RolloutConfig, update: UpdateConfig) -> None:
    """Raise `ValueError` for batches of the update that what was played cannot fill."""
    turn, microbatch = rollout.max_tokens_per_turn, update.max_tokens_per_microbatch
    if turn is not None and microbatch is not None and turn > microbatch:
        raise ValueError(
            f"update.max_tokens_per_microbatch ({microbatch}) is smaller than "
            f"rollout.max_tokens_per_turn ({turn}): raise the first, or leave it out"
        )
    if update.minibatches > rollout.prompts_per_iteration:
        raise ValueError(
            f"update.minibatches ({update.minibatches}) exceeds rollout.prompts_per_iteration "
            f"({rollout.prompts_per_iteration}): each minibatch needs a prompt of its own"
        )


def check_stream(rollout: RolloutConfig, imitates: bool) -> None:
    """Raise `ValueError` for settings that groups which go on under newer weights cannot have.

    imitates: the first iterations do.
    """
    problems = {
        f"rollout.alike_groups `{rollout.alike_groups}`: leave it out": rollout.filters_groups,
        f"rollout.deal `{rollout.deal}`, because groups go in order to whichever engine has room: "
        "leave it out": rollout.deal != "contiguous",
        "imitation: imitate in a run of its own, and begin this one from it (model.from)": imitates,
    }
    for problem, there in problems.items():
        if there:
            raise ValueError(f"schedule.mode `stream` does not go with {problem}")


def needs_zero_advantage(algorithm: AlgorithmConfig) -> str:
    """The setting by which samples without an advantage may have a gradient; empty: none."""
    if algorithm.kl.placement == "loss":
        return "algorithm.kl.placement is `loss`"
    for name in ("entropy_coefficient", "router_aux_loss_coef"):
        if getattr(algorithm, name):
            return f"algorithm.{name} is not 0"
    loss = POLICY_LOSSES.checked(algorithm.policy_loss)
    if loss is None or loss.zero_without_advantage:
        return ""
    return f"algorithm.policy_loss is {algorithm.policy_loss['name']!r}"
