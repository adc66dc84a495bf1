"""Writes demonstrations.jsonl: chats in which the calculator is called and its result is said.

`python demonstrations.py --chats 200 --seed 0`. No chat has an example of a call in front.
"""

import argparse
import json
import random
from pathlib import Path

from multiplication import RULES, example


def main() -> None:
    """Write the file."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--chats", type=int, default=200)
    made.add_argument("--seed", type=int, default=0)
    options = made.parse_args()
    source = random.Random(options.seed)
    with Path("demonstrations.jsonl").open("w") as file:
        for _ in range(options.chats):
            pair = source.randint(11, 99), source.randint(11, 99)
            messages = [{"role": "system", "content": RULES}, *example(*pair)]
            file.write(json.dumps({"messages": messages}) + "\n")


if __name__ == "__main__":
    main()
