"""Environments: the protocol, built-in games and adapters, and the pool that runs them.

base        the protocol `Environment`, its messages, results and errors
registry    environments by name or import path
games       tic-tac-toe and connect four, with random, greedy and searching opponents
prompt      one question, one answer, a reward function (`rewards` has some), of a `data_set`
textarena   adapter for textarena games, with random opponents (`textarena_moves`)
gymnasium   adapter for gymnasium's environments, whose spaces `gymnasium_spaces` makes texts
reasoning_gym   adapter for reasoning-gym's data sets
openenv     adapter for OpenEnv's environments, here or on a server (`openenv_sessions`)
agent       an agent of the user's own; `verifiers` are agents that play its environments
policy_conversation  what environments ask the policy
options     what the built-in ones are given, checked without pydantic
reward_functions  what scores whole episodes; `judges` are models behind an endpoint that do
endpoints   requests of judges and openenv: no redirects, no proxy to this machine
trial       what an environment does with random texts, for `earl env check`
pool        `EnvironmentPool`: environments in host processes; `host_keeper` replaces lost hosts and
            replays their episodes, `host_process` is one process seen from the pool, `host`,
            `calls` and `results` are what runs inside it, `connection` what they say to each other
"""
