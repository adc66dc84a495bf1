"""Every socket that a run with vLLM listens on: none beyond this machine, and none without a
password but torch's, gloo's and vLLM's own."""

from __future__ import annotations

import os

import pytest

from tests.cli.conftest import CONFIG, Earl
from tests.listeners import check, watching


@pytest.mark.slow
def test_a_run_with_two_ranks_and_vllm_listens_where_only_it_may_connect(fresh_earl: Earl) -> None:
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
