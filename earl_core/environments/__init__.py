"""Environments: the protocol, built-in games and adapters, and the pool that runs them.

base        the protocol `Environment`, its messages, results and errors
registry    environments by name or import path
games       tic-tac-toe and connect four, with random, greedy and searching opponents
prompt      one question, one answer, a reward function (`rewards` has some)
textarena   adapter for textarena games
agent       an agent of the user's own
reward_functions  what scores whole episodes; `judges` are models behind an endpoint that do
pool        `EnvironmentPool`: environments in host processes; `host_keeper` replaces lost hosts and
            replays their episodes, `host_process` is one process seen from the pool, `host`,
            `calls` and `results` are what runs inside it, `connection` what they say to each other
"""
