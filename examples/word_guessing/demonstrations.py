"""Writes demonstrations.jsonl: games of a player who keeps to the rules and else guesses at random.

`python demonstrations.py --games 300 --seed 0`
"""

import argparse
import json
import random
from pathlib import Path

from words import WordGuessing


def game(number: int, seed: int) -> list[dict[str, str]]:
    """The messages of a game. Its secret is none that training or evaluation counts on."""
    player = random.Random(f"player/{seed}/{number}")
    environment = WordGuessing()
    messages = environment.reset(1_000_000 + number, seed)
    while True:
        guess = player.choice(environment.legal_answers())
        messages.append({"role": "assistant", "content": guess})
        result = environment.step(guess)
        if result.done:
            return messages
        messages += result.messages


def main() -> None:
    """Write the file."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--games", type=int, default=300)
    made.add_argument("--seed", type=int, default=0)
    options = made.parse_args()
    with Path("demonstrations.jsonl").open("w") as file:
        for number in range(options.games):
            file.write(json.dumps({"messages": game(number, options.seed)}) + "\n")


if __name__ == "__main__":
    main()
