"""The Arrow schema of training samples: one row per sample (one token stream).

Token columns and turn columns are `large_list<T not null>`, each with its own offsets; within a
row all token columns have the same length, and so have all turn columns.

A worked example, prompt, answer, observation, answer (ids invented):

    text          <user>free: 1 2<end> <model>[2 <end> <user>free: 1<end> <model>[1 <end>
    tokens        5 40 41 42 6         7 20  6         5 40 41 6         7 19  6
    loss_mask     0  0  0  0 0         0  1  1         0  0  0 0         0  1  1
    rollout_logp  0  0  0  0 0         0 -.7 -.1       0  0  0 0         0 -.2 -.1
    turn_starts   0 (the first observation)            8 (the second observation)
    turn_rewards  0.0                                  1.0
    turn_numbers  0                                    1
    turns = 2, finish_reason = "done"

Token columns written by the rollout: `tokens` int32; `loss_mask` uint8, 1 on tokens that the
policy sampled, 0 on prompt, environment and given tokens; `rollout_logprobs` float32, natural
logarithms under the distribution really sampled from (temperature included), 0 where the mask
is 0, never NaN. Turn columns: `turn_starts` int32, the index of the turn's first token;
`policy_version_first`, `policy_version_last` int32, the policy versions that produced the turn's
first and last sampled token; `turn_rewards` float32; `turn_numbers` int32, how many answers of the
episode were given before this one, in whatever sample; `turn_anchors` int64, equal where the same
messages were answered. Scalars: `sample_id`, `episode_id`,
`group_id`, `prompt_id` int64; `turns` int32; `environment` string, its label where the run has
several, else empty; `role` string, of the conversation where an agent names its, else empty;
`shared_reward` float32, the part of the episode's reward that counts for each of its roles, 0 where
there are none; `finish_reason` string; `outcome` string, as the
environment called it, or empty; `scoring` string, JSON that the environment gives to reward
functions, or empty; `texts` string, a JSON list: each turn's observation and answer,
and in an episode's last sample what the environment said at its end; `forms` string, the grammars
that answers were sampled under (`trajectory.forms`), or empty. Rows are sorted by
`sample_id`. Later stages add columns for the same rows and never copy them.
"""

from __future__ import annotations

import pyarrow as pa

from earl_core.trajectory.routing import RoutingShape

SAMPLE_BITS = 16
"""An episode may have 2**16 samples: sample_id = episode_id << 16 | number of the sample."""


def token_list(value_type: pa.DataType) -> pa.DataType:
    """`large_list<T not null>`, the type of every token and turn column."""
    return pa.large_list(pa.field("item", value_type, nullable=False))


def _field(name: str, kind: pa.DataType, axis: str | None = None) -> pa.Field:
    # The axis says which columns count their elements together, even where lengths are equal by
    # chance.
    metadata = None if axis is None else {"earl.axis": axis}
    return pa.field(name, kind, nullable=False, metadata=metadata)


def per_token(name: str, value_type: pa.DataType) -> pa.Field:
    """A column with one value per token."""
    return _field(name, token_list(value_type), "tokens")


def _per_turn(name: str, value_type: pa.DataType) -> pa.Field:
    return _field(name, token_list(value_type), "turns")


ROLLOUT_SCHEMA = pa.schema(
    [
        _field("sample_id", pa.int64()),
        _field("episode_id", pa.int64()),
        _field("group_id", pa.int64()),
        _field("prompt_id", pa.int64()),
        _field("turns", pa.int32()),
        _field("environment", pa.large_string()),
        _field("role", pa.large_string()),
        _field("shared_reward", pa.float32()),
        _field("finish_reason", pa.large_string()),
        _field("outcome", pa.large_string()),
        _field("scoring", pa.large_string()),
        _field("texts", pa.large_string()),
        _field("forms", pa.large_string()),
        per_token("tokens", pa.int32()),
        per_token("loss_mask", pa.uint8()),
        per_token("rollout_logprobs", pa.float32()),
        _per_turn("turn_starts", pa.int32()),
        _per_turn("policy_version_first", pa.int32()),
        _per_turn("policy_version_last", pa.int32()),
        _per_turn("turn_rewards", pa.float32()),
        _per_turn("turn_numbers", pa.int32()),
        _per_turn("turn_anchors", pa.int64()),
    ]
)
"""Columns that the rollout stage writes."""

ROUTING = "routing"
ROUTING_HASH = "routing_hash"

_ROUTING_TYPES = {"uint8": pa.uint8(), "int16": pa.int16()}


def with_routing(schema: pa.Schema, routing: RoutingShape | None) -> pa.Schema:
    """The schema with the column `routing`: of each token the experts of each routed layer, layer
    after layer, an axis of its own; and `routing_hash` (`RoutingShape.hashes`), which says where
    samples are routed alike to whoever does not read all of it. routing: None: nothing is recorded,
    and there is neither."""
    if routing is None:
        return schema
    kind = _ROUTING_TYPES[routing.dtype]
    return schema.append(_field(ROUTING, token_list(kind), ROUTING)).append(
        per_token(ROUTING_HASH, pa.int64())
    )


GROUP_SCHEMA = ROLLOUT_SCHEMA.append(per_token("token_versions", pa.int32())).append(
    _field("opponent_versions", token_list(pa.int32()))
)
"""Columns of a group that is played while weights change: `token_versions` are the policy versions
that sampled each token, -1 where the mask is 0; `opponent_versions` are those that have answered as
the episode's opponent, ascending, the same in each of its samples, and none where nobody asked."""

REFERENCE_SCHEMA = pa.schema(
    [_field("sample_id", pa.int64()), per_token("reference_logprobs", pa.float32())]
)
"""Log-probs of the same tokens under the frozen initial policy."""

VALUES_SCHEMA = pa.schema([_field("sample_id", pa.int64()), per_token("values", pa.float32())])
"""What the critic expects of the return, before the token is sampled; 0 on tokens that are no time
step of the advantage estimator."""

REWARD_SCHEMA = pa.schema(
    [
        _field("sample_id", pa.int64()),
        _field("reward", pa.float32()),
        _field("scores", pa.large_string()),
        _per_turn("turn_totals", pa.float32()),
    ]
)
"""The episode's reward, repeated on each of its samples; what each reward function gave, a JSON
object by label; and the parts of the reward turn by turn: the environment's, and in the episode's
last turn, or the last of each of its roles, what the functions add and what the roles share.
Episodes that could not be scored have no rows."""

ADVANTAGE_SCHEMA = pa.schema(
    [_field("sample_id", pa.int64()), per_token("advantages", pa.float32())]
)
"""Advantages per token; 0 where the loss mask is 0."""

OLD_LOGPROBS_SCHEMA = pa.schema(
    [_field("sample_id", pa.int64()), per_token("old_logprobs", pa.float32())]
)
"""The trainer's log-probs before its first optimizer step."""
