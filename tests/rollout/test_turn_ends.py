"""What ends a turn: what the template writes, and what the model's files name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from earl_core.config import ConfigError, RunConfig, load_config
from earl_core.environments.base import Message
from earl_core.pretrained.model_directory import load_tokenizer
from earl_core.pretrained.vocabulary import check_tokenizer_file
from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.chat.conversation import Conversation
from earl_core.rollout.engine_factory import load_chat_tokenizer
from tests.conformance.templates import tokenizer_of
from tests.conformance.test_templates import CHATS, TOOLS
from tests.rollout.chat_models import CHATML, SPECIAL, char_tokenizer

SHAPE = {
    "num_attention_heads": 1,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "vocab_size": len(char_tokenizer()),
}
USER: Message = {"role": "user", "content": "Q1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What of a model the tokens depend on."""
    directory = tmp_path_factory.mktemp("model")
    tokenizer = char_tokenizer(CHATML)
    tokenizer.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(SHAPE | {"eos_token_id": 0}))
    return directory


def configured(model: Path, **overrides: str) -> RunConfig:
    given = [f"model.path={model}", *(f"{key}={value}" for key, value in overrides.items())]
    return load_config("tictactoe_tiny", given)


def changed(model: Path, copy: Path, **files: Any) -> RunConfig:
    """A copy of the model's tokenizer and configuration with these keys of these files."""
    copy.mkdir()
    for file in model.iterdir():
        (copy / file.name).write_text(file.read_text())
    for name, keys in files.items():
        path = copy / f"{name}.json"
        known = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps(known | keys))
    return configured(copy)


def number(text: str) -> int:
    return int(char_tokenizer().convert_tokens_to_ids(text))


BOS, EOT, END, LETTER = (number(each) for each in ("<|bos|>", "<|eot_id|>", "<|im_end|>", "q"))


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({"generation_config": {"eos_token_id": [EOT, BOS]}}, {EOT, BOS}),
        ({"generation_config": {"eos_token_id": EOT}}, {EOT}),
        ({"config": {"eos_token_id": [EOT]}}, {EOT}),
        ({"config": {"text_config": SHAPE | {"eos_token_id": [EOT, BOS]}}}, {EOT, BOS}),
        ({"config": {"eos_token_id": EOT}, "generation_config": {"eos_token_id": BOS}}, {EOT, BOS}),
        # A list is meant; a single number may be the one that nobody chose.
        ({"generation_config": {"eos_token_id": [LETTER, EOT]}}, {LETTER, EOT}),
        ({"config": {"eos_token_id": LETTER}}, set()),
        (
            {"generation_config": {"eos_token_id": None}, "config": {"eos_token_id": ["x", True]}},
            set(),
        ),
    ],
)
def test_every_end_that_a_models_files_name_stops(
    model: Path, tmp_path: Path, files: dict[str, Any], ends: set[int]
) -> None:
    chat = load_chat_tokenizer(changed(model, tmp_path / "model", **files))
    assert set(chat.stop_token_ids) == {END, 0} | ends
    for end in ends:
        sampled = [*chat.encode("ab"), end]
        assert chat.text_of(sampled) == chat.raw_text_of(sampled) == "ab"
        # It stays, and the template's own end follows.
        assert chat.next_prompt(sampled, [USER])[0] == END


def test_an_end_of_turn_that_is_no_special_token_stops_and_is_no_text() -> None:
    tokenizer = char_tokenizer(CHATML.replace("<|im_end|>", "</turn>"))
    tokenizer.add_tokens([AddedToken("</turn>", normalized=False)])
    end = tokenizer.convert_tokens_to_ids("</turn>")
    chat = ChatTokenizer(tokenizer)
    assert chat.stop_token_ids[0] == end
    sampled = [*chat.encode("ab"), end]
    assert chat.text_of(sampled) == chat.raw_text_of(sampled) == chat.beginning_of(sampled) == "ab"
    assert chat.next_prompt(sampled, [USER]).count(end) == 1  # the user's
    assert chat.next_prompt(sampled[:-1], [USER])[0] == end


@pytest.mark.parametrize("name", ["GLM 4", "GLM 4.5"])
def test_a_model_that_ends_its_turn_by_the_next_role(name: str) -> None:
    chat, tokenizer = CHATS[name], tokenizer_of(name)
    bare = ChatTokenizer(tokenizer, tool_format="hermes")
    user, observation = tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>"])
    assert user in bare.stop_token_ids
    assert {user, observation} <= set(chat.stop_token_ids)
    said = tokenizer.encode("\nHello.", add_special_tokens=False)
    for sampled in (said, [*said, user]):
        following = Conversation(chat)
        first = following.begin([USER])
        tokens, begins = following.follow(sampled, [USER])
        whole = tokens if begins else first + sampled + tokens
        assert tokenizer.decode(whole).count("<|user|>\nQ1") == 2
        assert whole.count(user) == 2
        assert "Hello." in tokenizer.decode(whole)


@pytest.mark.parametrize("between", ["", " ", "\n", "\n\n  ", " END "])
@pytest.mark.parametrize("end", ["</s>", None], ids=["ended", "cut"])
def test_text_between_an_answer_and_its_end_stands_once(between: str, end: str | None) -> None:
    tokenizer = char_tokenizer(
        "{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]{% else %}"
        f"{{{{ m.content }}}}{between}</s>{{% endif %}}{{% endfor %}}",
        ("</s>", "<s>", *SPECIAL[2:]),
    )
    chat = ChatTokenizer(tokenizer)
    sampled = chat.encode("yes" + (end or ""))
    text = tokenizer.decode(sampled + chat.next_prompt(sampled, [USER]))
    assert text == ("yes</s>[Q1]" if end else f"yes{between}</s>[Q1]")
    # A model that writes what the template does has all of it once.
    exact = chat.encode(f"yes{between}" + (end or ""))
    text = tokenizer.decode(exact + chat.next_prompt(exact, [USER]))
    assert text == f"yes{between}</s>[Q1]"


@pytest.mark.parametrize("message", ["</s>Q", "  ", "", "x</s>"])
def test_nothing_of_the_next_message_is_taken_for_the_end(message: str) -> None:
    """Templates without an end of turn: what looks like one in the next message is its text."""
    tokenizer = char_tokenizer(
        "{% for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}",
        ("</s>", "<s>", *SPECIAL[2:]),
    )
    chat = ChatTokenizer(tokenizer)
    sampled = chat.encode("yes</s>")
    following = chat.next_prompt(sampled, [{"role": "user", "content": message}])
    assert "".join(tokenizer.convert_ids_to_tokens(following)) == f"|user:{message}|"


def test_results_of_calls_follow_where_a_template_renders_them_after_calls_alone() -> None:
    """As MiniMax's does."""
    template = (
        "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% set ns = namespace(c=0) %}"
        "{% for m in messages %}{% if m.role == 'tool' %}{% if not ns.c %}"
        "{{ raise_exception('no call before') }}{% endif %}(tool){{ m.content }}<|im_end|>"
        "{% else %}({{ m.role }}){{ m.content }}{% for c in m.tool_calls or [] %}"
        "<tool_call>{{ c.function.name }}</tool_call>{% endfor %}<|im_end|>"
        "{% set ns.c = m.tool_calls %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}(assistant){% endif %}"
    )
    tokenizer = char_tokenizer(template)
    chat = ChatTokenizer(tokenizer)
    conversation = Conversation(chat, TOOLS)
    conversation.begin([USER])
    sampled = [*chat.encode("<tool_call>search</tool_call>"), END]
    result: Message = {
        "role": "tool",
        "content": "7",
        "tool_call_id": "call00000",
        "name": "search",
    }
    tokens, begins = conversation.follow(sampled, [result])
    assert not begins
    assert tokenizer.decode(tokens) == "(tool)7<|im_end|>(assistant)"


@pytest.mark.parametrize(
    ("bos", "adds", "begins"),
    [
        *[("<|bos|>", True, True), ("<|bos|>", False, True)],
        *[("<|endoftext|>", True, True), ("<|endoftext|>", False, False), (None, False, False)],
    ],
)
def test_the_fallback_begins_as_the_tokenizers_texts_do(
    tmp_path: Path, bos: str | None, adds: bool, begins: bool
) -> None:
    tokenizer = char_tokenizer(None)
    tokenizer.bos_token = bos
    if adds:
        pieces = {"single": f"{bos} $A", "special_tokens": [(bos, number(str(bos)))]}
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(**pieces)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    loaded = load_tokenizer(configured(tmp_path).model)
    chat = ChatTokenizer(loaded)
    tokens = chat.first_prompt([USER])
    text = ([bos] if begins else []) + list("user: Q1\nassistant:")
    assert loaded.convert_ids_to_tokens(tokens) == text
    assert loaded.bos_token_id not in chat.next_prompt([], [USER])[1:]


def named(directory: Path, where: str) -> None:
    """Two templates, as transformers keeps them now and as it did."""
    templates = {"default": CHATML, "tool_use": "<tool_call>{{ tools | tojson }}" + CHATML}
    (directory / "chat_template.jinja").unlink()
    if where == "list":
        tokenizer_config = json.loads((directory / "tokenizer_config.json").read_text())
        listed = [{"name": name, "template": text} for name, text in templates.items()]
        tokenizer_config["chat_template"] = listed
        (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    else:
        (directory / "chat_template.jinja").write_text(templates["default"])
        (directory / "additional_chat_templates").mkdir()
        (directory / "additional_chat_templates/tool_use.jinja").write_text(templates["tool_use"])


@pytest.mark.parametrize("where", ["list", "folder"])
def test_of_several_templates_the_one_for_tools_renders_tools(
    model: Path, tmp_path: Path, where: str
) -> None:
    config = changed(model, tmp_path / "model")
    named(tmp_path / "model", where)
    chat = load_chat_tokenizer(config)
    assert chat.render([USER]).startswith("<|im_start|>")
    assert chat.render([USER], TOOLS).startswith('<tool_call>[{"type"')
    assert chat.stop_token_ids == (END, 0)
    assert chat.read(chat.encode('<tool_call>{"name": "f"}</tool_call>'), TOOLS).calls
    # A file of the configuration's stands for all of them.
    (tmp_path / "own.jinja").write_text(CHATML)
    chosen = {"model.chat_template": str(tmp_path / "own.jinja")}
    chat = load_chat_tokenizer(configured(tmp_path / "model", **chosen))
    assert "# Tools" in chat.render([USER], TOOLS)


def test_named_templates_without_a_default_are_refused_by_name() -> None:
    tokenizer = char_tokenizer()
    tokenizer.chat_template = {"rag": CHATML, "tool_use": CHATML}
    with pytest.raises(ConfigError, match=r"templates named rag, tool_use and none named default"):
        ChatTokenizer(tokenizer)


def test_a_template_of_a_models_processor_is_found(model: Path, tmp_path: Path) -> None:
    config = changed(model, tmp_path / "model", chat_template={"chat_template": "!" + CHATML})
    (tmp_path / "model/chat_template.jinja").unlink(missing_ok=True)
    assert load_chat_tokenizer(config).render([USER]).startswith("!")


@pytest.mark.parametrize("kind", ["words", "added", "special", "written"])
def test_tokens_without_a_row_are_refused_unless_no_text_makes_them(
    model: Path, tmp_path: Path, kind: str
) -> None:
    rows = len(char_tokenizer())
    config = changed(model, tmp_path / "model", config={"vocab_size": rows - (kind == "words")})
    if kind != "words":
        core = Tokenizer.from_file(str(tmp_path / "model/tokenizer.json"))
        core.add_tokens([AddedToken("<image>", special=kind != "added", normalized=False)])
        core.save(str(tmp_path / "model/tokenizer.json"))
    template = "<image>" + CHATML if kind == "written" else CHATML
    (tmp_path / "model/chat_template.jinja").write_text(template)
    if kind == "special":
        chat = load_chat_tokenizer(config)
        tokens = chat.first_prompt([{"role": "user", "content": "a <image> b"}])
        assert max(tokens) < rows == chat.vocabulary
        return
    with pytest.raises(
        ConfigError, match=rf"has 1 tokens for which .* {rows - (kind == 'words')}\)"
    ):
        load_chat_tokenizer(config)


def test_rows_beyond_the_tokenizer_may_be_sampled_and_are_no_text(
    model: Path, tmp_path: Path
) -> None:
    rows = len(char_tokenizer()) + 24
    chat = load_chat_tokenizer(changed(model, tmp_path / "model", config={"vocab_size": rows}))
    assert chat.vocabulary == rows
    assert chat.text_of([*chat.encode("a"), rows - 1, *chat.encode("b")]) == "ab"


def test_a_word_that_ends_answers_stays_a_word() -> None:
    """Models of code end at a new line; others name an id that the tokenizer has no token for."""
    words = ["<s>", "a", "Ċ", "aa"]
    core = Tokenizer(models.BPE({each: at for at, each in enumerate(words)}, [("a", "a")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<s>{% endfor %}"
    chat = ChatTokenizer(tokenizer, eos_token_ids=[2, 7], rows=9)
    assert {2, 7} < set(chat.stop_token_ids)
    assert chat.first_prompt([{"role": "user", "content": "a\naaaa"}]) == [1, 2, 3, 3, 0]
    assert chat.text_of([1, 2]) == "a"


@pytest.mark.parametrize("added", [[{"id": 9}], "x", [5]])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path, added: Any) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    with pytest.raises(ConfigError, match=r"tokenizer\.json is no tokenizer"):
        check_tokenizer_file(tmp_path, 5)
