"""A model directory's statements about tokens beside its tokenizer: those that end a text, and the
number of rows for them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from earl_core.system.errors import ConfigError
from earl_core.system.outside import read_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_MOST_BYTES = 512 << 20
"""Most bytes of a tokenizer: large vocabularies have some tens of megabytes."""


def named_ends(directory: Path, added: Collection[int]) -> list[int]:
    """Every `eos_token_id` of `generation_config.json` and `config.json`, in their order.

    added: ids of tokens that are more than words. A single id that is a word is left out: it is
    what transformers writes where nobody has named one.
    """
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        raw = _mapping(directory / name)
        for part in (raw, raw.get("text_config")):
            named = part.get("eos_token_id") if isinstance(part, Mapping) else None
            if isinstance(named, list):
                found += [each for each in named if type(each) is int and each >= 0]
            elif type(named) is int and named in added:
                found.append(named)
    return list(dict.fromkeys(found))


def check_tokenizer_file(directory: Path, rows: int) -> None:
    """`check_rows` of a directory's `tokenizer.json`; without one nothing is checked."""
    raw = _mapping(directory / "tokenizer.json")
    try:
        found, special = _tokens(raw)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ConfigError(
            f"{directory / 'tokenizer.json'} is no tokenizer ({type(error).__name__}: {error})",
            remedy="copy the tokenizer that belongs to the model",
        ) from None
    if max(found, default=-1) >= rows:
        check_rows(directory, found, special, rows, _templates(directory))


def _tokens(raw: Mapping[str, Any]) -> tuple[dict[int, str], set[int]]:
    """Return the tokens of a `tokenizer.json` by id, and the ids of special ones."""
    model = raw.get("model")
    words = model.get("vocab", ()) if isinstance(model, Mapping) else ()
    if isinstance(words, Mapping):
        found = {number: str(text) for text, number in words.items() if type(number) is int}
    else:
        found = {number: str(each[0]) for number, each in enumerate(words) if each}
    special: set[int] = set()
    for each in raw.get("added_tokens") or ():
        number = int(each["id"])
        found[number] = str(each["content"])
        if each.get("special"):
            special.add(number)
    return found, special


def check_tokenizer(directory: Path, tokenizer: PreTrainedTokenizerBase, rows: int) -> None:
    """`check_rows` of a loaded tokenizer."""
    if len(tokenizer) > rows:
        found = {number: text for text, number in tokenizer.get_vocab().items()}
        special = {
            number for number, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        check_rows(directory, found, special, rows, str(tokenizer.chat_template))


def check_rows(
    directory: Path, tokens: Mapping[int, str], special: Iterable[int], rows: int, template: str
) -> None:
    """Raise `ConfigError` where a model has no row for a token that a text may hold.

    tokens: texts by id. Special ones that the template does not write never reach the model, since
    texts that hold them are quoted (Gemma 3's image token has no row in the models without images).
    """
    unused = {number for number in special if tokens[number] not in template}
    lost = sorted(number for number in tokens if number >= rows and number not in unused)
    if lost:
        named = ", ".join(f"{tokens[number]!r} ({number})" for number in lost[:3])
        raise ConfigError(
            f"the tokenizer in {directory} has {len(lost)} tokens for which the model has no row "
            f"(its vocab_size is {rows}): {named}",
            remedy="resize the model's embeddings and save it again (resize_token_embeddings), or "
            "copy the tokenizer that belongs to it",
        )


def vocabulary_problem(policy: Path, teacher: Path, rows: tuple[int, int]) -> str:
    """Return the reason why a teacher cannot score what a policy writes; empty when it can.

    Their tokenizers must have the same tokens under the same ids. rows: of the policy's and of the
    teacher's embedding; some models have more than their tokens need.
    """
    found = [_mapping(directory / "tokenizer.json") for directory in (policy, teacher)]
    if all(found):
        own, theirs = (_tokens(raw)[0] for raw in found)
        for number in sorted(own.keys() | theirs.keys()):
            if own.get(number) != theirs.get(number):
                return (
                    f"token {number} is {theirs.get(number)!r} there and {own.get(number)!r} in "
                    "the policy"
                )
    elif rows[0] != rows[1]:
        return f"it has {rows[1]} tokens, and the policy {rows[0]}"
    if rows[1] < rows[0]:
        return f"it has rows for {rows[1]} tokens, and the policy for {rows[0]}"
    return ""


def own_template(directory: Path) -> str:
    """The chat template of a directory's tokenizer; empty without one."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    return str(_mapping(directory / "tokenizer_config.json").get("chat_template") or "")


def _templates(directory: Path) -> str:
    named = _mapping(directory / "tokenizer_config.json").get("chat_template")
    files = [directory / "chat_template.jinja", *directory.glob("additional_chat_templates/*")]
    return "\n".join([str(named), *(file.read_text("utf-8") for file in files if file.is_file())])


def _mapping(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(read_text(path, str(path), _MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return raw if isinstance(raw, dict) else {}
