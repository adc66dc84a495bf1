"""An agent that is a program: it asks the policy once, and does what its task says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any


def ask(path: str, body: Any, policy: Any = os.environ) -> tuple[int, Any]:
    url = f"{policy['OPENAI_BASE_URL']}/{path}"
    headers = {"Authorization": f"Bearer {policy['OPENAI_API_KEY']}"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def main() -> None:
    with open(os.environ["EARL_TASK"]) as file:
        task = json.load(file)
    does = task["does"][task["index"] % len(task["does"])]
    if does != "reads nothing":
        assert json.load(sys.stdin) == task
    assert os.listdir(os.environ["EARL_DIRECTORY"]) == []
    messages = [{"role": "user", "content": f"{task['index']}?"}]
    status, reply = ask("chat/completions", {"model": "policy", "messages": messages})
    assert status == 200, reply
    if does == "number":
        print("some words\n", 0.25, "\n", sep="")
    elif does in ("object", "reads nothing"):
        print(json.dumps({"reward": 0.5, "outcome": "good", "metrics": {"n": 1}}))
    elif does == "rewards":
        print(json.dumps({"rewards": {reply["id"]: 0.5}}))
    elif does == "names it twice":
        print(f'{{"rewards": {{"{reply["id"]}": 1, "{reply["id"]}": 2}}}}')
    elif does == "fails":
        print("the disk is full", file=sys.stderr)
        sys.exit(3)
    elif does == "hangs":
        subprocess.Popen(["sleep", "3600"])
        time.sleep(3600)
    elif does == "leaves a child":
        subprocess.Popen(["sleep", "3601"])
        print(1)
    elif does == "words":
        print("1 or 2")
    elif does in ("posts", "posts twice"):
        reward = {"reward": 0.75, "outcome": "posted"}
        assert ask("reward", {"reward": "much"})[0] == 400
        assert ask("reward", reward)[0] == 200
        if does == "posts twice":
            status, reply = ask("reward", reward)
            assert (status, reply["error"]["code"]) == (409, "reward_posted")
    elif does == "posts unasked":
        status, reply = ask("reward", 1.0)
        assert (status, reply["error"]["code"]) == (409, "reward_not_awaited")
    elif does == "exits":
        sys.exit(task["index"] % 2)


if __name__ == "__main__":
    main()
