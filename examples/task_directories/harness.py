"""A harness that solves tasks by commands of a shell. It knows OpenAI's API, nothing of EARL."""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request

RULES = (
    "You work in a folder of files. Answer with one command of the shell, and nothing else. "
    "Example: to write how many lines a.txt has into answer.txt, wc -l < a.txt > answer.txt"
)
TURNS = 2
SECONDS = 10
SHOWN = 500


def main() -> None:
    """Ask for a command, run it and show what it printed, until there is an answer."""
    task = json.load(sys.stdin)
    messages = [
        {"role": "system", "content": RULES},
        {"role": "user", "content": task["instruction"]},
    ]
    for _ in range(TURNS):
        command = ask(messages)
        if command is None:
            break
        messages += [
            {"role": "assistant", "content": command},
            {"role": "user", "content": run(command)},
        ]
        if os.path.exists("answer.txt"):
            break


def ask(messages: list[dict[str, str]]) -> str | None:
    """The policy's answer; None where the episode's turns or tokens are spent."""
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    headers = {
        "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
        "Content-Type": "application/json",
    }
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as reply:
            return json.load(reply)["choices"][0]["message"]["content"] or ""
    except urllib.error.HTTPError as error:
        if error.code == 400:
            return None
        raise


def run(command: str) -> str:
    """What a command prints, or how it ended."""
    try:
        done = subprocess.run(
            ["sh", "-c", command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
        )
    except (subprocess.TimeoutExpired, ValueError) as error:
        return f"Error: {error}"
    return (done.stdout + done.stderr)[-SHOWN:] or f"(exit code {done.returncode})"


if __name__ == "__main__":
    main()
