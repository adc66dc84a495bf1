"""Environments: the protocol, built-in games and adapters, and the pool that runs them.

base        the protocol `Environment`, its messages, results and errors
registry    environments by name or import path
options     what the built-in ones are given, checked without pydantic
prompt      one question, one answer, a reward function (`rewards` has some), of a data set
agent       an agent of the user's own
policy_conversation  what environments ask the policy
judges      reward functions that ask models behind an endpoint
endpoints   requests of judges and openenv: no redirects, no proxy to this machine
games       tic-tac-toe and connect four, with random, greedy and searching opponents
adapters    textarena, gymnasium, pettingzoo, reasoning-gym, OpenEnv, verifiers, data sets
task_directories  tasks of Harbor and Terminal-Bench
shared_world  what all episodes of a process share that have equal options
rewards     reward functions of `prompt`; `reward_functions` score whole episodes
tools       tools that the model calls, and the sandbox of one
hosting     `EnvironmentPool`: environments in host processes; `host_supervisor` replaces lost hosts
            and replays their episodes, `host_process` is one process seen from the pool, `host` and
            `host_calls` are what runs inside it, `connection` what they say to each other
trial       what an environment does with random texts, for `earl env check`
"""
