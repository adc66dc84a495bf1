"""Writes train.jsonl and test.jsonl: word problems in the form of GSM8K, the same for each seed.

`python make_data.py --rows 512 --seed 0`
"""

import argparse
import json
import random
from pathlib import Path

NAMES = ("Ann", "Ben", "Clara", "David", "Emma", "Finn", "Grace", "Henry", "Ivy", "Jack")
THINGS = ("apples", "books", "cards", "coins", "eggs", "flowers", "marbles", "pencils", "shells")


def problem(source: random.Random) -> dict[str, str]:
    """One row. The answer has the steps, then `#### ` and the number."""
    name, thing = source.choice(NAMES), source.choice(THINGS)
    first, second = source.randint(2, 9), source.randint(2, 9)
    if source.random() < 0.5:
        told = f"{name} has {first} {thing} and gets {second} more."
        step, number = f"{first} + {second}", first + second
    else:
        first += second
        told = f"{name} has {first} {thing} and gives {second} away."
        step, number = f"{first} - {second}", first - second
    return {
        "question": f"{told} How many {thing} does {name} have now?",
        "answer": f"{name} has {step} = <<{step}={number}>>{number} {thing}.\n#### {number}",
    }


def main() -> None:
    """Both files, without a question that is in both."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--rows", type=int, default=512, help="of train.jsonl; test.jsonl has 128")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--directory", type=Path, default=Path())
    options = made.parse_args()
    source = random.Random(options.seed)
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < options.rows + 128:
        row = problem(source)
        rows.setdefault(row["question"], row)
    lines = [json.dumps(row) + "\n" for row in rows.values()]
    (options.directory / "test.jsonl").write_text("".join(lines[:128]))
    (options.directory / "train.jsonl").write_text("".join(lines[128:]))


if __name__ == "__main__":
    main()
