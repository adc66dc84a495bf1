"""Engine against trainer in bfloat16, with the experts that were played and with routers anew.

    python -m benchmarks.routing_mismatch --markdown FILE

`tictactoe_moe` plays on vLLM and is trained twice from one model, `rollout.record_routing` on and
off. Seldom does a router choose otherwise, but then log-probs are far apart: the mean hardly shows
it, the divergence and the greatest difference do (arXiv 2510.11370).
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import fmean

from benchmarks.distillation import earl, settings
from earl_core.run.record import read_lines
from tools.harness import Report, Row, parser, publish

_ARMS = {"replayed": "auto", "routed anew": "off"}
_NUMBERS = ("kl", "mean", "p95", "max")


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--iterations", type=int, default=6)
    made.add_argument("--seeds", type=int, default=2)
    options = made.parse_args()
    if options.quick:
        options.iterations, options.seeds = 1, 1
    report = Report(
        "routing_mismatch", "Mismatch of a mixture in bfloat16, with and without replay"
    )
    with tempfile.TemporaryDirectory(prefix="earl-routing-") as scratch:
        for arm, recorded in _ARMS.items():
            lines = [
                line
                for seed in range(options.seeds)
                for line in _trained(Path(scratch), recorded, seed, options.iterations)
            ]
            report.rows.append(_row(arm, lines))
    replayed, anew = report.rows
    report.headline["routing_mismatch_ratio"] = float(replayed["kl"] or 0) / float(anew["kl"] or 1)
    report.notes += [
        f"{options.seeds} seeds of {options.iterations} iterations of 256 episodes each. "
        "routing_mismatch_ratio is that of the divergences (nats a token, `update/mismatch_kl`).",
        "max: the mean over iterations of the greatest difference of a token.",
    ]
    publish(report, options)


def _trained(scratch: Path, recorded: str, seed: int, iterations: int) -> list[dict[str, float]]:
    name = f"{recorded}_{seed}"
    wanted = [
        f"seed={seed}", f"runs_directory={scratch / 'runs'}",
        f"model.path={scratch / f'model_{seed}'}",
        f"model.builder_options={{family: qwen3_moe, heads: 6, seed: {seed}}}",
        f"iterations={iterations}", "evaluation.every=0", "rollout.engine=vllm",
        "rollout.dtype=bfloat16", "update.precision=bf16", f"rollout.record_routing={recorded}",
    ]  # fmt: skip
    earl("train", "tictactoe_moe", "--name", name, "--quiet", *settings(wanted))
    return list(read_lines(scratch / "runs" / name / "metrics.jsonl"))


def _row(arm: str, lines: list[dict[str, float]]) -> Row:
    changed = [line["update/routing_changed_share"] for line in lines if arm == "replayed"]
    return {
        "update": arm,
        **{name: fmean(line[f"update/mismatch_{name}"] for line in lines) for name in _NUMBERS},
        "choices that differ %": 100 * fmean(changed) if changed else None,
    }


if __name__ == "__main__":
    main()
