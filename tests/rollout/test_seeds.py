from __future__ import annotations

import itertools
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from earl_core.trajectory.samples import derive_seed


def test_known_value_on_every_machine() -> None:
    assert derive_seed(0, 12, "rollout", 7, 3) == 4581136894354536572


def test_other_parts_or_another_order_give_other_seeds() -> None:
    parts = [derive_seed(*p) for p in itertools.product(range(12), ("a", "b", "1"), range(12))]
    parts += [derive_seed(1, 2), derive_seed(2, 1), derive_seed("1", 2), derive_seed(12)]
    assert len(set(parts)) == len(parts)


@given(st.lists(st.integers() | st.text(), max_size=6))
def test_seeds_have_63_bits(parts: list[int | str]) -> None:
    assert 0 <= derive_seed(*parts) < 2**63


def test_the_agent_loop_imports_no_torch() -> None:
    code = (
        "import sys, earl_core.rollout.agent_loop, earl_core.rollout.rollout_worker; "
        "print([m for m in ('torch', 'transformers', 'vllm') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
