"""Compare bf16 packed training on a GPU with float32 on single samples.

For small random models and packs (uneven samples, shared prefixes, one long sample), log-probs of
the trained tokens and gradients of a random loss are compared with float32 on single samples
through transformers' own attention and full logits. bf16 has an error of its own: that of bf16
autocast on single samples, which is measured beside. Packed bf16 passes with at most `SLACK` times
that error, packed float32 with nearly none.

`context` rows: the attention of 2 and 4 context ranks' parts, through the same kernel, against the
attention of the whole pack. `mesh` rows, with several GPUs: three optimizer steps on each mesh
against one GPU.

Run it as `python -m benchmarks.gpu.update_bf16` from the repository's root; the exit status says
whether all passed. `--smoke` runs it on a CPU too, with two ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.reshard import in_ranks
from earl_core.config.algorithm import AlgorithmConfig
from earl_core.config.model import ModelConfig
from earl_core.config.update import UpdateConfig
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.learner.attention.attention_plan import SampleBoundaries
from earl_core.learner.attention.context_parallel import ContextCut, ContextGroup, PackExchange
from earl_core.learner.attention.varlen import varlen_attention
from earl_core.learner.data.packing import TrainingSample, pack
from earl_core.learner.loading import load_policy
from earl_core.learner.model import PackedTensors, logprobs_of_trained
from earl_core.learner.parallel.mesh import create_mesh, leave_world
from earl_core.learner.policy_learner import PolicyLearner
from tools.harness import Report, Row, parser, publish
from tools.shapes import Shape, random_sample, save_random_model

TITLE = "bf16 packed training against float32 on single samples"
SLACK = 1.5
# Of packed float32: sums in another order, over thousands of terms.
FLOAT32_BOUND = 1e-3
# Of attention cut into parts: the whole pack's own rounding to bf16, in another order.
ATTENTION_BOUND = 1e-2
# Mean difference of log-probs after three bf16 steps on a mesh.
MESH_BOUND = 2e-2
STEPS = 3

Result = tuple[torch.Tensor, dict[str, torch.Tensor]]


def shapes(*, smoke: bool) -> list[Shape]:
    width, vocabulary = (64, 256) if smoke else (512, 4096)
    dim = 16 if smoke else 64

    def shape(kind: str, heads: int, head_dim: int, *, tied: bool, window: int | None) -> Shape:
        return Shape(kind, kind, width, 2 * width, 3, heads, 2, head_dim, vocabulary, tied, window)

    return [
        shape("llama", 8, dim, tied=False, window=None),
        shape("qwen2", 4, 2 * dim, tied=True, window=None),
        shape("mistral", 8, dim, tied=False, window=48 if smoke else 512),
    ]


def packs(vocabulary: int, *, smoke: bool) -> dict[str, list[TrainingSample]]:
    rng = np.random.default_rng(0)
    scale = 1 if smoke else 8

    def samples(lengths: list[int], prefix: np.ndarray | None = None) -> list[TrainingSample]:
        return [
            random_sample(rng, scale * length, vocabulary, number=number, prefix=prefix)
            for number, length in enumerate(lengths)
        ]

    shared = rng.integers(3, vocabulary, 80 * scale).astype(np.int32)
    return {
        "uneven": samples([256, 190, 90, 89, 88, 40, 17, 9, 3]),
        "shared prefix": samples([200, 160, 150, 120, 81], shared),
        "long": samples([1024]),
    }


def loss_weights(samples: list[TrainingSample], device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(int(sample.loss_mask.sum()), generator=generator).to(device)
        for sample in samples
    ]


def gradients_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    found = {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad()
    return found


def autocast(device: torch.device, *, bf16: bool) -> torch.autocast | nullcontext[None]:
    return torch.autocast(device.type, dtype=torch.bfloat16) if bf16 else nullcontext()


def alone(model: PreTrainedModel, samples: list[TrainingSample], *, bf16: bool) -> Result:
    """Sample by sample, transformers' own attention, full logits."""
    device = model.device
    parts = []
    for sample, weights in zip(samples, loss_weights(samples, device), strict=True):
        tokens = torch.from_numpy(sample.tokens.astype(np.int64)).to(device)[None]
        with autocast(device, bf16=bf16):
            logits = model(input_ids=tokens, use_cache=False).logits[0, :-1]
        at = torch.from_numpy(np.flatnonzero(sample.loss_mask) - 1).to(device)
        distribution = torch.log_softmax(logits.index_select(0, at).float(), dim=-1)
        logprobs = distribution.gather(1, tokens[0, at + 1, None])[:, 0]
        (logprobs * weights).sum().backward()
        parts.append(logprobs.detach())
    return torch.cat(parts), gradients_of(model)


def packed(model: PreTrainedModel, samples: list[TrainingSample], *, bf16: bool) -> Result:
    """Compute the result as training does it, in one pack."""
    device = model.device
    tensors = PackedTensors.from_microbatch(pack(samples, range(len(samples))), device)
    with autocast(device, bf16=bf16):
        logprobs, _ = logprobs_of_trained(model, tensors, temperature=1.0)
    (logprobs * torch.cat(loss_weights(samples, device))).sum().backward()
    return logprobs.detach(), gradients_of(model)


def errors(found: Result, reference: Result) -> dict[str, float]:
    """Measure the errors. Log-probs: mean and largest difference. Gradients: ‖g - r‖ / ‖r‖ over
    everything."""
    difference = (found[0] - reference[0]).abs()
    squares = [(found[1][name] - r).square().sum() for name, r in reference[1].items()]
    norms = [r.square().sum() for r in reference[1].values()]
    ratio = torch.stack(squares).sum() / torch.stack(norms).sum()
    return {
        "log-probs mean": float(difference.mean()),
        "log-probs max": float(difference.max()),
        "gradient": float(ratio.sqrt()),
    }


def model_rows(shape: Shape, directory: Path, device: torch.device, *, smoke: bool) -> list[Row]:
    save_random_model(shape, directory, positions=16384, scale=3.0)
    plain = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="sdpa"
    ).to(device)
    plain.eval()
    ours = load_policy(ModelConfig(path=str(directory)), create_mesh()).model.to(device)  # type: ignore[arg-type]
    rows: list[Row] = []
    for name, samples in packs(shape.vocabulary, smoke=smoke).items():
        reference = alone(plain, samples, bf16=False)
        limits = errors(alone(plain, samples, bf16=True), reference)
        rounded = errors(packed(ours, samples, bf16=True), reference)
        exact = errors(packed(ours, samples, bf16=False), reference)
        case = f"{shape.name}, {name}"
        passed = all(rounded[key] <= SLACK * limits[key] for key in ("log-probs mean", "gradient"))
        rows.append({"case": case, "how": "single bf16", **limits})
        rows.append({"case": case, "how": "packed bf16", **rounded, "passed": word(passed)})
        passed = max(exact["log-probs max"], exact["gradient"]) <= FLOAT32_BOUND
        rows.append({"case": case, "how": "packed fp32", **exact, "passed": word(passed)})
    return rows


def word(passed: bool) -> str:
    return "yes" if passed else "NO"


States = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def attend_part(
    states: States,
    towards: torch.Tensor,
    boundaries: SampleBoundaries,
    mine: torch.Tensor,
    window: int | None,
) -> torch.Tensor:
    """The attention of the queries at `mine`; adds to the gradients of all."""
    query, key, value = states
    attended, _ = varlen_attention(
        torch.nn.Module(), query[:, :, mine], key, value, None,
        sliding_window=window, sample_boundaries=boundaries,
    )  # fmt: skip
    attended.backward(towards[:, mine])
    return attended.detach()


def taken_gradients(states: States) -> dict[str, torch.Tensor]:
    found = {}
    for name, leaf in zip(("query", "key", "value"), states, strict=True):
        assert leaf.grad is not None
        found[name], leaf.grad = leaf.grad.float(), None
    return found


def context_rows(shape: Shape, device: torch.device, *, smoke: bool) -> list[Row]:
    """The parts of 2 and 4 context ranks, one after another on one device."""
    rows: list[Row] = []
    generator = torch.Generator().manual_seed(5)
    for name, samples in packs(shape.vocabulary, smoke=smoke).items():
        tree = pack(samples, range(len(samples))).tree
        sizes = [(1, heads, tree.size, shape.head_dim) for heads in (shape.heads, shape.kv_heads)]
        query, key, value, towards = (
            torch.randn(size, generator=generator).to(device, torch.bfloat16)
            for size in (sizes[0], sizes[1], sizes[1], sizes[0])
        )
        towards = towards.transpose(1, 2)
        states = (query.requires_grad_(), key.requires_grad_(), value.requires_grad_())
        boundaries = SampleBoundaries.from_tree(tree, device)
        everything = torch.arange(tree.size, device=device)
        whole = attend_part(states, towards, boundaries, everything, shape.window)
        reference = (whole.float(), taken_gradients(states))
        for size in (2, 4):
            cut = ContextCut.even(tree.size, size)
            found = torch.empty_like(whole)
            for rank in range(size):
                exchange = PackExchange(ContextGroup(rank, size, None), cut)
                boundaries = SampleBoundaries.from_tree(tree, device, exchange)
                # The keys of all ranks are here already.
                boundaries = dataclasses.replace(boundaries, exchange=None)
                mine = torch.from_numpy(cut.positions(rank)).to(device)
                found[:, mine] = attend_part(states, towards, boundaries, mine, shape.window)
            got = errors((found.float(), taken_gradients(states)), reference)
            rows.append(
                {
                    "case": f"{shape.name}, {name}",
                    "how": f"context {size}, attention",
                    "attention max": got["log-probs max"],
                    "gradient": got["gradient"],
                    "passed": word(max(got["log-probs mean"], got["gradient"]) <= ATTENTION_BOUND),
                }
            )
    return rows


def mesh_shapes(ranks: int) -> dict[str, StageDeployment]:
    found = {
        f"replicas {ranks}": StageDeployment("update", replicas=ranks),
        f"shard {ranks}": StageDeployment("update", shard=ranks),
        f"context {ranks}": StageDeployment("update", context_parallel=ranks),
    }
    if ranks == 2:
        found["tensor 2"] = StageDeployment("update", tensor_parallel=2)
    if ranks == 4:
        found["shard 2, context 2"] = StageDeployment("update", shard=2, context_parallel=2)
        found["context 2, tensor 2"] = StageDeployment(
            "update", context_parallel=2, tensor_parallel=2
        )
        found["replicas 2, shard 2"] = StageDeployment("update", replicas=2, shard=2)
    return found


def train(directory: Path, shape: StageDeployment | None, *, smoke: bool) -> dict[str, list[float]]:
    """Log-probs by sample of this rank's samples, after three steps; losses under `loss`."""
    mesh = None if shape is None else create_mesh(shape)
    vocabulary = shapes(smoke=smoke)[0].vocabulary
    samples = [sample for part in packs(vocabulary, smoke=smoke).values() for sample in part]
    samples = [
        dataclasses.replace(sample, sample_id=number, episode_id=number, group_id=number // 4)
        for number, sample in enumerate(samples)
    ]
    if mesh is not None:
        samples = [
            s for s in samples if s.group_id % mesh.deployment.data_parallel == mesh.data_rank
        ]
    learner = PolicyLearner(
        ModelConfig(path=str(directory)),
        UpdateConfig(
            precision="bf16", learning_rate=1e-4, max_tokens_per_microbatch=1024 if smoke else 8192
        ),
        AlgorithmConfig(),
        mesh=mesh,
    )
    losses = [learner.update(samples, iteration=step)["loss"] for step in range(STEPS)]
    scored = learner.score(samples)
    if mesh is not None:
        mesh.close()
    found = {
        str(sample.sample_id): values[sample.loss_mask == 1].tolist()
        for sample, values in zip(samples, scored, strict=True)
    }
    return found | {"loss": losses}


def train_rank(ranks: int, directory: str, smoke: bool) -> dict[str, dict[str, list[float]]]:
    """What `train` returns, by mesh, in one of `ranks` processes: every mesh after the other."""
    found = {
        name: train(Path(directory), shape, smoke=smoke)
        for name, shape in mesh_shapes(ranks).items()
    }
    leave_world()
    return found


def mesh_rows(ranks: int, directory: Path, *, smoke: bool) -> list[Row]:
    save_random_model(shapes(smoke=smoke)[0], directory, positions=16384, scale=3.0)
    expected = train(directory, None, smoke=smoke)
    trained = in_ranks(train_rank, ranks, ranks, str(directory), smoke)
    rows: list[Row] = []
    for name in mesh_shapes(ranks):
        differences, losses = [], []
        for found in (each[name] for each in trained):
            losses.append(np.subtract(found.pop("loss"), expected["loss"]))
            for sample, values in found.items():
                differences.append(np.abs(np.subtract(values, expected[sample])))
        difference = np.concatenate(differences)
        rows.append(
            {
                "case": "llama",
                "how": f"mesh {name}, bf16",
                "log-probs mean": float(difference.mean()),
                "log-probs max": float(difference.max()),
                "loss max": float(np.abs(losses[0]).max()),
                "passed": word(float(difference.mean()) <= MESH_BOUND),
            }
        )
    return rows


def options() -> argparse.Namespace:
    made = parser(__doc__ or "", smoke=True)
    made.add_argument(
        "--ranks",
        type=int,
        choices=(0, 2, 4),
        help="of the meshes; 0: no meshes; as many as there are GPUs if not given",
    )
    given = made.parse_args()
    if given.ranks is None:
        gpus = torch.cuda.device_count()
        given.ranks = 4 if gpus >= 4 else 2 if gpus >= 2 or given.smoke else 0
    return given


def notes(device: torch.device, given: argparse.Namespace) -> Iterator[str]:
    yield f"On {torch.cuda.get_device_name() if device.type == 'cuda' else 'a CPU'}."
    yield (
        f"Passed: packed bf16 with at most {SLACK} times the error of bf16 on single samples (mean "
        f"of log-probs, gradient); packed fp32 below {FLOAT32_BOUND}; attention in parts below "
        f"{ATTENTION_BOUND}; meshes below {MESH_BOUND} in the mean of log-probs, {STEPS} steps."
    )
    if given.ranks == 0:
        yield "No mesh was tried: that needs several GPUs."


def main() -> None:
    given = options()
    cuda = torch.cuda.is_available()
    if not cuda and not given.smoke:
        print("This check needs a CUDA device, and there is none here: nothing was checked.")
        return
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device("cuda" if cuda else "cpu")
    wanted = shapes(smoke=given.smoke)[: 1 if given.quick else None]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="earl-benchmark-") as name:
        directory = Path(name)
        for shape in wanted:
            rows += model_rows(shape, directory / shape.name, device, smoke=given.smoke)
            rows += context_rows(shape, device, smoke=given.smoke)
        if given.ranks:
            rows += mesh_rows(given.ranks, directory / "mesh", smoke=given.smoke)
    failed = sum(row.get("passed") == "NO" for row in rows)
    made = Report("update_bf16", TITLE, rows, {"failed": failed}, list(notes(device, given)))
    publish(made, given)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
