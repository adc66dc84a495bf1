"""The chat templates of a tokenizer: which one renders, what they write, what they know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from earl_core.environments.base import Message, ToolCall, call_id
from earl_core.rollout.chat.tool_calls import NO_TOOLS, WRITTEN, Tools
from earl_core.system.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}:"
    "{% if message['role'] == 'assistant' %}{{ message['content'] }}{{ eos_token }}"
    "{% else %} {{ message['content'] }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""Used when neither the tokenizer nor the configuration has a chat template, after the beginning of
a text where the tokenizer has one. The space before an answer is left to the model: most
vocabularies join it to the first word."""

QUESTION: Message = {"role": "user", "content": "question"}
TOOL = Tools(
    [
        {
            "type": "function",
            "function": {
                "name": "earltoolmark",
                "description": "A tool.",
                "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
            },
        }
    ]
)
RESULT: Message = {
    "role": "tool",
    "content": "1",
    "tool_call_id": call_id(0),
    "name": "earltoolmark",
}
_SYSTEM = "earlsystemmark"
_GIVEN = frozenset(
    (
        *("messages", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize"),
        *("continue_final_message", "padding", "truncation", "max_length", "return_tensors"),
        *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "conversation"),
    )
)
"""Variables and arguments of transformers' rendering that are nobody's to give."""


def called(results: Sequence[Message]) -> list[ToolCall]:
    """Calls that have these results."""
    return [
        ToolCall(
            id=result.get("tool_call_id", call_id(number)),
            type="function",
            function={"name": result.get("name", "tool"), "arguments": {}},
        )
        for number, result in enumerate(results)
        if result["role"] == "tool"
    ]


class ChatTemplate:
    """The chat template of a tokenizer that has one, several by name, or none.

    Where there are several, `tool_use` renders conversations with tools and `default` the others,
    as transformers chooses. options: variables that it is told in every conversation. Raises
    `ConfigError` where there is no default, and for options that no template reads.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._options = dict(options or {})
        named = _named(tokenizer)
        if "default" not in named:
            raise ConfigError(
                f"the tokenizer has chat templates named {', '.join(sorted(named))} and none named "
                "default",
                remedy="set model.chat_template to the Jinja file of one of them",
            )
        self._default = named["default"]
        self._tool_use = named.get("tool_use", self._default)
        self.sources = "\n".join(dict.fromkeys((self._tool_use, self._default)))
        """Texts of all templates, the one for tools first."""
        self.options = read_options((self._tool_use, self._default))
        """Names of variables that a conversation may give a template."""
        if unread := sorted(self._options.keys() - self.options):
            raise ConfigError(
                f"rollout.chat_template_kwargs has {', '.join(unread)}, and the chat template "
                f"reads {', '.join(sorted(self.options)) or 'no such variable'}",
                remedy="leave it out, or set model.chat_template to a Jinja file that reads it",
            )
        self.knows_tools = TOOL.schemas[0]["function"]["name"] in self._tried([QUESTION], TOOL)
        """True when the model is told of tools."""
        self.knows_reasoning = "reasoning_content" in self.sources
        """True when a message of the assistant's may have its reasoning beside its content."""
        self.knows_system = _SYSTEM in self._tried(
            [{"role": "system", "content": _SYSTEM}, QUESTION], NO_TOOLS
        )
        """True when there may be a message of the system."""

    @property
    def written(self) -> str:
        """Texts that the templates hold, and texts that they and our own words for tools write."""
        answer: Message = {"role": "assistant", "content": "answer"}
        calling: Message = {"role": "assistant", "content": "", "tool_calls": called([RESULT])}
        rendered = [
            self._tried([*first, QUESTION, *more], tools, prompt)
            for first in ([], [Message(role="system", content="system")])
            for more in ([], [answer], [answer, QUESTION], [calling], [calling, RESULT])
            for tools in (NO_TOOLS, TOOL)
            for prompt in (True, False)
        ]
        return "\n".join([self.sources, WRITTEN, *rendered])

    def apply(
        self, messages: Sequence[Message], tools: Tools, add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation. Raises whatever the template raises."""
        text: Any = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=list(tools.schemas) or None,
            chat_template=self._tool_use if tools else self._default,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **{**self._options, **tools.options},
        )
        return str(text)

    def _tried(
        self, messages: Sequence[Message], tools: Tools, add_generation_prompt: bool = True
    ) -> str:
        try:
            return self.apply(messages, tools, add_generation_prompt)
        except Exception:  # whatever a template raises for what it does not know
            return ""


def read_options(sources: Sequence[str]) -> frozenset[str]:
    """Names of the variables that templates read beside the conversation and the tokenizer's
    tokens."""
    from jinja2 import TemplateSyntaxError, meta
    from transformers.utils.chat_template_utils import _compile_jinja_template

    read: set[str] = set()
    for source in sources:
        try:
            environment = _compile_jinja_template(source).environment
            named = meta.find_undeclared_variables(environment.parse(source))
        except TemplateSyntaxError:  # rendering says what is wrong with it
            continue
        read |= named - environment.globals.keys()
    return frozenset(name for name in read if name not in _GIVEN and not name.endswith("_token"))


def _named(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    templates: Any = tokenizer.chat_template
    if isinstance(templates, Mapping):
        return dict(templates)
    if isinstance(templates, list):
        return {str(each["name"]): str(each["template"]) for each in templates}
    begins = "{{ bos_token }}" if not templates and _begins_texts(tokenizer) else ""
    return {"default": templates or begins + PLAIN_TEMPLATE}


def _begins_texts(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Tell whether the model has seen a token before each text."""
    begin = tokenizer.bos_token_id
    if begin is None:
        return False
    # Where it is the end of texts, too, the tokenizer's own rule tells.
    return begin != tokenizer.eos_token_id or begin in tokenizer.encode("a")[:1]
