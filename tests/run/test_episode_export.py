"""Episodes that leave the machine: planted secrets are hidden, or named among what is left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from earl_core.config import ConfigError
from earl_core.config.redaction import load_rules
from earl_core.run.episode_export import Exported, export_episodes
from earl_core.run.episodes import SCHEMA, EpisodesDamaged
from earl_core.secrets.rules import Redaction

WORD = "Ada Lovelace"
CARD = "4111-1111-1111-1111"
RULES = f"""
words: [{WORD}, Projekt Zugvogel]
patterns:
  - {{name: card, match: '(?:\\d{{4}}-){{3}}\\d{{4}}'}}
  - {{name: person, match: 'P-\\d{{5}}', hash: true}}
  - {{name: nothing of it, match: 'never-there'}}
drop_turns: ['INTERNAL ONLY']
hash_fields: [prompt_id, group_id]
key: env:EARL_TEST_REDACTION_KEY
"""
TEXTS = [
    f"Hello {WORD}, card {CARD}", "no АDА  lovelace here, but P-12345",
    "tool: {'who': 'ada\u200b LOVELÁCE', 'id': 'P-12345'}", "ok",
    "INTERNAL ONLY: the plan", "I repeat the plan",
    "the first half is Projekt Zug", "I see",
    "vogel is the other, on 2026-03-04 at 12:30, see /home/someone/notes", "fine",
    f"closing words for {WORD}",
]  # fmt: skip


def kept(run: Path, episodes: list[dict[str, Any]]) -> None:
    """Write a file of kept episodes with these fields."""
    empty = {
        name: "" if pa.types.is_large_string(kind) else 0 if not pa.types.is_nested(kind) else []
        for name, kind in zip(SCHEMA.names, SCHEMA.types, strict=True)
    }
    rows = [
        {**empty, "episode_id": number, "sample_id": number << 16, **each}
        for number, each in enumerate(episodes)
    ]
    for row in rows:
        row["turn_rewards"] = [0.0] * (len(row["texts"]) // 2)
    path = run / "iterations/000003/episodes.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), path, write_page_checksum=True)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of two episodes with secrets in every field that holds words of others."""
    monkeypatch.setenv("EARL_TEST_REDACTION_KEY", "a long key")
    first = {
        "texts": TEXTS, "prompt_id": 7, "group_id": 7, "reward": 0.5,
        "environment": "office", "finish_reason": "done", "outcome": f"told {WORD}",
        "scoring": json.dumps({WORD: {"card": CARD, "plain": int(CARD.replace("-", ""))}}),
        "scores": json.dumps({"judge": 0.25}),
    }  # fmt: skip
    second = {**first, "texts": ["P-12345 again, at someone@example.org", "yes"], "scoring": ""}
    kept(tmp_path / "run", [first, second])
    (tmp_path / "rules.yaml").write_text(RULES)
    return tmp_path / "run"


def rules_in(path: Path) -> Redaction:
    return Redaction(load_rules(path))


def exported(run: Path, name: str) -> tuple[Exported, str]:
    done = export_episodes(run, run.parent / name, rules_in(run.parent / "rules.yaml"))
    return done, (run.parent / name).read_bytes().decode(errors="replace")


def test_planted_secrets_are_in_no_field(run: Path) -> None:
    done, text = exported(run, "out.jsonl")
    assert done.episodes == 2
    for secret in ("Lovelace", "lovelace", "LOVEL", CARD, "P-12345", "the plan", "vogel", "Zug"):
        assert secret not in text, secret
    first, second = map(json.loads, text.splitlines())
    assert [each["role"] for each in first["messages"]] == ["user", "assistant"] * 5
    assert first["messages"][4]["content"] == first["messages"][5]["content"] == "(turn dropped)"
    assert first["messages"][6]["content"].startswith("the first half is (hidden)")
    assert first["closing"] == "closing words for (hidden)"
    assert first["outcome"] == "told (hidden)"
    assert first["reward"] == 0.5
    assert first["scores"] == {"judge": 0.25}
    # The same person is one hash everywhere, and fields of equal numbers are not.
    person = second["messages"][0]["content"].split(" again")[0]
    assert person.startswith("(person ")
    assert person in first["messages"][1]["content"]
    assert first["prompt_id"] == second["prompt_id"] != first["group_id"]
    assert "tokens" not in first
    assert done.found["pattern nothing of it"] == 0
    assert done.found["word 2"] == 1
    assert done.found["turns 1"] == 1


def test_what_is_left_is_told_to_its_owner(run: Path) -> None:
    done, _ = exported(run, "out.jsonl")
    left = json.loads(done.report.read_text())
    assert done.report.stat().st_mode & 0o077 == 0
    # The same number without dashes is what a rule cannot know.
    assert CARD.replace("-", "") in left["tokens"]["first"]
    assert "someone@example.org" in left["tokens"]["first"]
    times = {each["text"] for each in left["linked"]["first_times"]}
    assert {"2026-03-04", "12:30"} <= times
    assert any("/home/someone" in each for each in left["tokens"]["first"])
    assert left["not_looked_for"]


def test_parquet_holds_what_json_lines_hold(run: Path) -> None:
    _, text = exported(run, "out.jsonl")
    exported(run, "out.parquet")
    rows = pq.read_table(run.parent / "out.parquet").to_pylist()
    for row, line in zip(rows, text.splitlines(), strict=True):
        for name in ("scores", "scoring"):
            row[name] = json.loads(row[name])
        assert row == json.loads(line)


def test_turns_words_and_neighbours_are_found_in_disguise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EARL_TEST_REDACTION_KEY", "a long key")
    texts = [
        "internal ОNLY: one", "it is one", "ＩＮＴＥＲＮＡＬ only: two", "it is two",
        "Søren, soren, SØ\u3164REN", "no Đor\u2800đe", "P-12345P-67890P-12345", "end of it",
    ]  # fmt: skip
    kept(tmp_path / "run", [{"texts": texts}])
    (tmp_path / "rules.yaml").write_text(
        "words: [Søren, Dorde]\ndrop_turns: [INTERNAL ONLY]\nkey: env:EARL_TEST_REDACTION_KEY\n"
        "patterns: [{name: p, match: 'P-\\d{5}', hash: true}, {name: at, match: '(?<=it)'}]"
    )
    done, text = exported(tmp_path / "run", "out.jsonl")
    said = [each["content"] for each in json.loads(text)["messages"]]
    assert said[:6] == ["(turn dropped)"] * 4 + ["(hidden), (hidden), (hidden)", "no (hidden)"]
    assert done.found == {"word 1": 3, "word 2": 1, "turns 1": 2, "pattern p": 3, "pattern at": 0}
    # Places between characters hold nothing, and three persons side by side stay three.
    assert said[7] == "end of it"
    one, two, three = said[6].strip("()").split(")(")
    assert one == three != two


def test_long_stretches_of_a_prompt_in_answers_are_told(tmp_path: Path) -> None:
    prompt = "The quick brown fox jumps over the lazy dog and then it rests beside the river."
    kept(tmp_path / "run", [{"texts": [prompt, f"You said: {prompt} Yes.", "bye", "short"]}])
    done = export_episodes(tmp_path / "run", tmp_path / "out.jsonl", Redaction())
    assert done.remnants["turns"]["verbatim"] == 1
    assert prompt in done.remnants["turns"]["first"][0]["text"]


@pytest.mark.parametrize(
    ("rules", "why"),
    [
        ("patterns: [{name: a, match: '.*'}]", "finds the empty text"),
        ("patterns: [{name: a, match: '['}]", "is no regular expression"),
        ("patterns: [{name: a, match: '(?s).+'}]", "hide every word"),
        ("patterns: [{name: a, match: '\\w+'}]", "hide every word"),
        ("patterns: [{name: a, match: '[a-m]+'}, {name: b, match: '[^a-m]'}]", "hide every word"),
        ("drop_turns: ['.']", "hide every word"),
        ("drop_turns: ['[a-m]', '[^a-m]']", "hide every word"),
        ("drop_turns: [Hello|again, tool|INTERNAL|half|vogel, closing]", "leave nothing of any"),
        ("hash_fields: [reward]\nkey: env:HOME", "tells nothing"),
        ("words: ['']", "is empty"),
        ("hash_fields: [prompt_id]", "need a key"),
        ("words: [a]\nkey: plain-text", "is no reference"),
        ("hash_fields: [outcome]\ndrop_fields: [outcome]\nkey: env:HOME", "choose one"),
        ("hash_fields: [outcome]\nkey: env:EARL_NOT_THERE", "leads to nothing"),
        ("drop_fields: [tokens]", "drop_fields.0"),
        ("key: env:HOME", "there is no rule"),
        ("[]", "holds no rules"),
        ("phrases: [x]", "unknown key"),
    ],
)
def test_bad_rules_are_refused_in_a_sentence(rules: str, why: str, run: Path) -> None:
    path = run.parent / "bad.yaml"
    path.write_text(rules)
    with pytest.raises(ConfigError, match=why):
        export_episodes(run, run.parent / "bad.jsonl", rules_in(path))
    assert not list(run.parent.glob("bad.jsonl*"))


def test_what_cannot_be_exported_is_said(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is to end with"):
        export_episodes(run, tmp_path / "out.csv", Redaction())
    (tmp_path / "mine.jsonl").write_text("mine")
    with pytest.raises(ConfigError, match="is no export of ours, and is not replaced"):
        export_episodes(run, tmp_path / "mine.jsonl", Redaction())
    assert (tmp_path / "mine.jsonl").read_text() == "mine"
    with pytest.raises(ConfigError, match="has kept no episodes"):
        export_episodes(tmp_path / "none", tmp_path / "out.jsonl", Redaction())
    for file in run.glob("iterations/*/episodes.parquet"):
        file.write_bytes(b"nothing")
    with pytest.raises(EpisodesDamaged, match=r"no kept episodes of .* can be read"):
        export_episodes(run, tmp_path / "out.jsonl", Redaction())
    assert not (tmp_path / "out.jsonl").exists()
