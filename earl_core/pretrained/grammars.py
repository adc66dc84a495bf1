"""Grammars over a model's tokens: which may come next in an answer of a form.

A grammar is a *structural tag* of xgrammar as JSON: texts, JSON of a schema, patterns, one after
the other or one of several. vLLM masks with the same library, so that all who compute a log-prob
agree on the masks as long as they have the same release of it, the same tokenizer and the same
rows.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from earl_core.config.model import ModelConfig
from earl_core.pretrained.model_directory import load_tokenizer, read_model_shape
from earl_core.system.errors import ConfigError, EarlError
from earl_core.trajectory.forms import Form

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CACHE_BYTES = 256 * 2**20
_THREADS = 2
_DEEPEST = 64
"""Levels; vLLM takes 16 more."""
_NOT_MASKED = -1
_TRIED = 256
"""Answers of forms that were tried lately."""
_DRAWN = 128
"""Tokens of answers that end late, and as many of answers that end soon."""
_SEED = 0
_CLOSING = frozenset(b'"]}')
_TOKEN_SECONDS = 0.1
_ROUGH_SECONDS, _USUAL_SECONDS = 0.5, 0.02
"""Of a processor, for one token, and for all that are drawn: so much and that for each."""
_REPEATED_SECONDS = 60.0
"""Of a processor, for the masks of one sample, beside `_TOKEN_SECONDS` for each of its tokens."""


class GrammarError(EarlError):
    """A grammar that does not compile, or tokens that it does not allow."""


@dataclass(frozen=True)
class TokenMasks:
    """Which tokens were allowed in the place of each token of a sample.

    rows: int32 [masks, vocabulary / 32], each once, maybe of several samples; bit n of word w is
    token 32 w + n. index: int32 [L], the row of each token, -1 where all were allowed.
    """

    rows: np.ndarray
    index: np.ndarray


class Held(NamedTuple):
    """A sample's tokens, and its forms, each with the places of its answer's tokens, ascending.
    name: for errors."""

    tokens: np.ndarray
    forms: Sequence[tuple[Form, np.ndarray]]
    name: str = ""


class Grammars:
    """The grammars of one tokenizer, compiled once each; for several threads. vocabulary: rows of
    the model's head, which may be more than the tokenizer has tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> None:
        import xgrammar

        self._library: Any = xgrammar
        with _refused("the tokenizer cannot be masked"):
            known = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary)
        self._compiler = xgrammar.GrammarCompiler(
            known, max_threads=_THREADS, cache_enabled=True, cache_limit_bytes=_CACHE_BYTES
        )
        self.words = -(-vocabulary // 32)
        """Of a mask."""
        texts = known.decoded_vocab
        self._closing = np.array([bool(each) and _CLOSING.issuperset(each) for each in texts])
        self._tried = lru_cache(_TRIED)(self._problem)

    def compile(self, grammar: str) -> Any:
        """The compiled grammar. Raises `GrammarError`."""
        if _depth(grammar) > _DEEPEST:
            raise GrammarError(f"it nests objects and lists over {_DEEPEST} levels deep")
        with _refused("it has no grammar"):
            return self._compiler.compile_structural_tag(grammar)

    def matcher(self, form: Form, tokens: Sequence[int] = ()) -> Matcher:
        """What follows an answer of the form. tokens: its first ones. Raises `GrammarError`."""
        stops = list(form.stops) or None
        native = self._library.GrammarMatcher(
            self.compile(form.grammar), override_stop_tokens=stops
        )
        matcher = Matcher(native, self.words)
        for token in tokens:
            matcher.accept(token)
        return matcher

    def check(self, form: Form, beginnings: tuple[str, ...] = ("",)) -> None:
        """Draw answers of the form. Raises `GrammarError` where one comes to a place with which no
        token goes on, or a token takes too long. beginnings: texts after which they are drawn."""
        if problem := self._tried(form, beginnings):
            raise GrammarError(problem)

    def _problem(self, form: Form, beginnings: tuple[str, ...]) -> str:
        """Why answers of the form cannot be sampled; "" for a form whose drawn ones can."""
        drawing = _Drawing(self._closing, np.random.default_rng(_SEED))
        most = max(_DRAWN // len(beginnings), _DRAWN // 4)
        try:
            for beginning in beginnings:
                for soon in (False, True):
                    left = most
                    while left > 0:
                        matcher = self.matcher(form)
                        matcher.say(beginning)
                        left -= drawing.answer(matcher, form.stops, soon, left)
        except GrammarError as error:
            return str(error)
        return ""

    def masks(self, samples: Sequence[Held]) -> list[TokenMasks | None]:
        """The masks of samples; None for one without a form. Raises `GrammarError` for a token that
        its grammar does not allow, and where they take too long."""
        known: dict[bytes, int] = {}
        indices = []
        for held in samples:
            try:
                indices.append(self._index(held, known) if held.forms else None)
            except GrammarError as error:
                raise GrammarError(f"{held.name}: {error}") from error
        rows = np.frombuffer(b"".join(known), np.int32).reshape(len(known), self.words)
        return [None if index is None else TokenMasks(rows, index) for index in indices]

    def _index(self, held: Held, known: dict[bytes, int]) -> np.ndarray:
        """The number of each token's mask among those that are known."""
        most = _REPEATED_SECONDS + _TOKEN_SECONDS * len(held.tokens)
        ends = time.thread_time() + most
        index = np.full(len(held.tokens), _NOT_MASKED, np.int32)
        for form, places in held.forms:
            matcher = self.matcher(form)
            for place in places.tolist():
                index[place] = known.setdefault(matcher.allowed().tobytes(), len(known))
                matcher.accept(int(held.tokens[place]))
                if time.thread_time() > ends:
                    raise GrammarError(
                        f"its masks take over {most:.0f} s to compute again: have its "
                        "agent ask for a simpler form, or set rollout.requests.constrained to free"
                    )
        return index


class Matcher:
    """An answer under a grammar, as it grows."""

    def __init__(self, native: Any, words: int) -> None:
        self._native, self._mask = native, np.empty((1, words), np.int32)

    def allowed(self) -> np.ndarray:
        """The mask of the next token, int32 [words]; valid until the next call. Raises
        `GrammarError` where it allows none."""
        self._mask.fill(-1)  # it may leave alone what allows all
        self._native.fill_next_token_bitmask(self._mask)
        if not self._mask.any():
            raise GrammarError("no token of the vocabulary goes on with it")
        return self._mask[0]

    def say(self, text: str) -> None:
        """Go on with this text. Raises `GrammarError` where the grammar does not allow it."""
        if text and not self._native.accept_string(text):
            raise GrammarError(f"it does not allow {text!r:.100}")

    def accept(self, token: int) -> None:
        """Go on with this token. Raises `GrammarError` where the grammar does not allow it."""
        if not self._native.accept_token(token):
            raise GrammarError(
                f"token {token} is not allowed by the grammar that its answer was sampled under: "
                "engine and trainer must have the same tokenizer and the same release of xgrammar"
            )


class _Drawing:
    """Draws tokens at random, and looks at what they take, all together. closing: whether each
    token closes what JSON opens."""

    def __init__(self, closing: np.ndarray, random: np.random.Generator) -> None:
        self._closing, self._random = closing, random
        self._spent, self._drawn = 0.0, 0

    def answer(self, matcher: Matcher, stops: tuple[int, ...], soon: bool, most: int) -> int:
        """Draw an answer; returns how many tokens it has, at most so many. soon: it ends as soon as
        it can, or nearly, so that all parts of a form come; else as late as it can, since a token
        takes the longer the more came before it. Raises `GrammarError`."""
        token = -1
        for count in range(1, most + 1):
            began = time.thread_time()
            if token >= 0:
                matcher.accept(token)
            bits = np.unpackbits(matcher.allowed().view(np.uint8), bitorder="little")
            self._took(time.thread_time() - began)
            may = np.flatnonzero(bits[: len(self._closing)])
            ends = np.isin(may, stops)
            preferred = ends | self._closing[may] if soon else ~ends
            if preferred.any() and (not soon or self._random.random() < 0.5):
                may, ends = may[preferred], ends[preferred]
            at = self._random.integers(len(may))
            if ends[at]:
                return count
            token = int(may[at])
        return most

    def _took(self, seconds: float) -> None:
        self._spent, self._drawn = self._spent + seconds, self._drawn + 1
        if seconds > _TOKEN_SECONDS or (
            self._spent > _ROUGH_SECONDS + self._drawn * _USUAL_SECONDS
        ):
            raise GrammarError(
                f"a token of it takes too long ({1000 * seconds:.0f} ms for the last of "
                f"{self._drawn} that were tried)"
            )


def _depth(text: str) -> int:
    """How deep JSON nests."""
    depth = deepest = 0
    for sign in re.sub(r'"(?:[^"\\]|\\.)*"', "", text):
        depth += (sign in "[{") - (sign in "]}")
        deepest = max(deepest, depth)
    return deepest


@contextmanager
def _refused(what: str) -> Iterator[None]:
    """The library raises its own errors, pydantic's and those of Python."""
    try:
        yield
    except Exception as error:
        told = " ".join(str(error).split())
        raise GrammarError(f"{what}: {told:.300}") from error


def check_library() -> None:
    """Raise `ConfigError` where the library is not installed."""
    try:
        import xgrammar  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"rollout.requests.constrained is engine, and xgrammar cannot be imported ({error})",
            remedy="pip install xgrammar==0.2.8, which comes with vLLM, or set it to free",
        ) from error


_loading = threading.Lock()


@lru_cache(maxsize=4)
def _of_directory(directory: Path, trust_remote_code: bool) -> Grammars:
    model = ModelConfig(path=str(directory), trust_remote_code=trust_remote_code)
    return Grammars(load_tokenizer(model), read_model_shape(directory).vocabulary)


def grammars_of(directory: Path, trust_remote_code: bool) -> Grammars:
    """The grammars of a model directory's tokenizer, the same object for all in a process. Raises
    `ConfigError` where the library is not installed, `GrammarError` for a tokenizer that it does
    not take."""
    check_library()
    with _loading:
        return _of_directory(directory, trust_remote_code)
