"""Judges and reward models behind a real HTTP endpoint, and the documented example."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from earl_core.environments.judges import Judge, JudgeFailed
from earl_core.environments.registry import create
from tests.experience.test_scoring import RIGHT, scores_of

SECRET = "a-key-of-the-judge"
ROOT = Path(__file__).resolve().parents[2]


class Endpoint:
    """A server of models that answers the requests given to it, by what `answers` say in turn."""

    def __init__(self, *answers: tuple[int, Any]) -> None:
        self.asked: list[tuple[str, str | None, Any]] = []
        endpoint, left = self, list(answers)

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                endpoint.asked.append((self.path, self.headers["Authorization"], body))
                status, answer = left.pop(0) if len(left) > 1 else left[0]
                if not status:
                    return  # without a word
                data = json.dumps(answer).encode()
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def serving(self) -> Iterator[Endpoint]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()


def said(text: str) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


def test_a_judge_is_asked_again_until_it_gives_a_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    good = said("Score 3 would be harsh. Score: 7.5")
    overloaded = (429, {"error": "slow down"})
    with Endpoint((0, None), overloaded, (200, good)).serving() as endpoint:
        judge = {
            "function": "judge",
            "options": {
                "base_url": f"{endpoint.url}/v1/",
                "api_key": "env:JUDGE_KEY",
                "model": "large",
                "prompt": '{question}: {answer} for {scoring.answer}? {"score": 1}\n{conversation}',
                "scale": [0, 10],
                "request": {"max_tokens": 9},
            },
        }
        found = scores_of(tmp_path, [judge], episodes=3, concurrency=1, retries=2)
    assert found.failures == {}
    assert found.given == {number: {"judge": 0.75} for number in range(3)}
    # One after the other, the first one three times.
    assert len(endpoint.asked) == 5
    path, key, body = endpoint.asked[-1]
    assert (path, key) == ("/v1/chat/completions", f"Bearer {SECRET}")
    text = body.pop("messages")[0]["content"]
    assert text.startswith(
        'question 0: xx for xx? {"score": 1}\nuser: question 0\n\nassistant: yes'
    )
    assert body == {"model": "large", "max_tokens": 9, "temperature": 0.0}
    assert SECRET not in (tmp_path / "rank-rewards.log").read_text()


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((200, said("I cannot say.")), "no score that is certain: 'I cannot say.'"),
        ((200, said("Score: 11")), "the judge gave 11, which is not on the scale"),
        ((200, {"error": "?"}), "sent no chat completion"),
        ((302, {}), "answered with status 302"),
        ((500, {"error": "broken"}), 'answered with status 500: {"error": "broken"}'),
        ((200, said("Score: 5")), "the episode has no 'nothing' there: it has ['answer']"),
    ],
)
def test_a_judge_that_gives_no_score_gives_no_reward(
    tmp_path: Path, answer: tuple[int, Any], why: str
) -> None:
    prompt = "{scoring.nothing}" if "nothing" in why else "How good?"
    with Endpoint(answer).serving() as endpoint:
        options = {"base_url": endpoint.url, "model": "m", "prompt": prompt}
        judge = {"function": "judge", "options": options}
        found = scores_of(tmp_path, [judge, RIGHT], episodes=1)
    assert found.given == {}
    assert why in found.failures[0]


@pytest.mark.parametrize(
    ("text", "scale", "pattern", "score"),
    [
        ("Score: -3", [-5, 5], None, 0.2),
        ("Score: \N{MINUS SIGN}3", [-5, 5], None, 0.2),
        ("Score (0-10): 8", [0, 10], None, 0.8),
        ("Score: .5", [0, 10], None, 0.05),
        ("Score: 8\nMaximum score: 10", [0, 10], None, 0.8),
        ("Verdict 8/10. Verdict 9/10", [0, 10], r"Verdict (\S+)", 0.9),
        ("Score: 8-9", [0, 10], None, None),
        ("Verdict eight. Score: 8", [0, 10], r"Verdict (\w+)", None),
    ],
)
def test_a_judges_words_become_a_score(
    text: str, scale: list[float], pattern: str | None, score: float | None
) -> None:
    with Endpoint((200, said(text))).serving() as endpoint:
        options: dict[str, Any] = {"base_url": endpoint.url, "model": "m", "timeout_seconds": 9}
        judge = Judge(prompt="How good?", scale=scale, pattern=pattern, **options)
        if score is None:
            with pytest.raises(JudgeFailed, match="no score that is certain"):
                judge({"messages": []})
        else:
            assert judge({"messages": []}) == pytest.approx(score)


def test_a_reward_model_scores_the_messages(tmp_path: Path) -> None:
    answer = {"data": [{"index": 0, "label": "LABEL_0", "probs": [-3.5], "num_classes": 1}]}
    with Endpoint((200, answer)).serving() as endpoint:
        options = {"base_url": endpoint.url, "model": "scalar"}
        model = {"function": "reward_model", "options": options}
        found = scores_of(tmp_path, [model], episodes=1)
    assert found.given == {0: {"reward_model": -3.5}}
    ((path, key, body),) = endpoint.asked
    assert (path, key, body["use_activation"]) == ("/classify", None, False)
    assert [each["role"] for each in body["messages"]] == ["user", "assistant"] * 2


def test_the_documented_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/how-to/own-reward.md").read_text()
    (tmp_path / "my_rewards.py").write_text(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    shown = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[0])
    (tmp_path / "questions.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}')
    path = {"path": str(tmp_path / "questions.jsonl")}
    environment = create("prompt", {**shown["environment"]["options"], **path})
    assert environment.reset(0, 0)
    assert environment.step("2").info["scoring"] == {"answer": "2"}
    with Endpoint((200, said("Well.\nScore: 7"))).serving() as endpoint:
        *_, judge = functions = shown["reward"].pop("functions")
        judge["options"]["base_url"] = endpoint.url
        found = scores_of(tmp_path, functions, episodes=3, **shown["reward"])
    brief = {0: 1 - 1 / 200, 1: 1 - 2 / 200, 2: 1 - 2 / 200}
    assert found.given == {
        number: {"exact": float(number == 2), "brief": brief[number], "helpful": 0.7}
        for number in range(3)
    }
