"""Every socket that a run listens on: none beyond this machine, and none without a password but
torch's, gloo's and vLLM's own."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.cli.conftest import CONFIG, Earl
from tests.listeners import Listener, owner, watching


def check(heard: dict[Listener, str], *owners: str) -> None:
    assert {listener for listener in heard if not listener.on_loopback} == set()
    assert {listener for listener in heard if listener.kind != "tcp"} == set()
    for listener, answer in heard.items():
        # `docs/security.md` names those that want no password.
        assert owner(listener) in ("torch", "vllm") or " 401 " in answer, (listener, answer)
    # Otherwise nothing was looked at.
    assert set(owners) <= {owner(listener) for listener in heard}


def test_a_run_with_two_ranks_listens_where_only_it_may_connect(
    finished_run: subprocess.CompletedProcess[str], heard: dict[Listener, str]
) -> None:
    check(heard, "torch", "other")


@pytest.mark.slow
def test_a_run_with_two_ranks_and_vllm_does_too(fresh_earl: Earl) -> None:
    settings = fresh_earl.settings(
        model__builder_options__hidden="128",
        model__builder_options__heads="4",
        rollout__engine="vllm",
        rollout__vllm__kv_cache_gib="1",
        rollout__max_model_len="256",
        stages__update__replicas="2",
        iterations="1",
        evaluation__every="0",
    )
    with watching(os.getpid()) as heard:
        done = fresh_earl.run("train", str(CONFIG), *settings, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    check(heard, "torch", "vllm", "other")
