"""The shapes of published chat templates, in words of our own, and tokenizers with their tokens.

A shape is what a model reads: the tokens around each message, in which order, what is trimmed, what
of earlier turns is dropped, and what a generation begins with. Descriptions of tools are short.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_PAIRS = ("think", "tool_call", "tool_response")
WORDS = tuple(f"<{end}{name}>" for name in _PAIRS for end in ("", "/"))
"""Added tokens that are not special, as Qwen3 has them."""
_LAST_USER = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
_DROPPED = "m.content.split('</think>')[-1].lstrip('\\n')"
_CALLS = (
    "{% for call in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}"
)
_TOOLS = "{% for tool in tools or [] %}\n{{ tool | tojson }}{% endfor %}"


def turns(
    user: str,
    assistant: str,
    prompt: str,
    *,
    system: str = "",
    tool: str = "",
    begin: str = "",
    content: str = "m.content",
    answer: str = "m.content",
    calls: str = "",
) -> str:
    """A template that writes each message between the two parts of its role's text, at `%`."""

    def said(text: str, what: str) -> str:
        before, _, after = text.partition("%")
        return f"{before}{{{{ {what} }}}}{after}"

    def last(text: str) -> str:
        before, mark, after = said(text, answer).rpartition("}}")
        return before + mark + calls + after

    roles = {"user": said(user, content), "assistant": last(assistant)}
    roles |= {"system": said(system, content)} if system else {}
    roles |= {"tool": said(tool, "m.content")} if tool else {}
    cases = "".join(
        f"{{% {'elif' if number else 'if'} m.role == '{role}' %}}{text}"
        for number, (role, text) in enumerate(roles.items())
    )
    unknown = "{% else %}{{ raise_exception('unknown role') }}{% endif %}"
    asked = f"{{% if add_generation_prompt %}}{prompt}{{% endif %}}"
    return f"{begin}{{% for m in messages %}}{cases}{unknown}{{% endfor %}}{asked}"


@dataclass(frozen=True)
class Published:
    """template: or several by name. special: control tokens, those that end and begin a text first.
    ends: that the model's files name beside. differs: what of `docs/concepts/samples.md` makes the
    tokens of a conversation differ from the template's."""

    template: str | dict[str, str]
    special: tuple[str, ...]
    ends: tuple[str, ...] = ()
    differs: str = ""
    words: tuple[str, ...] = field(default=WORDS)


def chatml(system: str = "", **options: str) -> str:
    """Of Qwen and its kin. system: what stands there where no message does."""
    default = f"<|im_start|>system\n{system}<|im_end|>\n"
    begin = f"{{% if messages[0].role != 'system' %}}{default}{{% endif %}}" if system else ""
    return turns(
        "<|im_start|>user\n%<|im_end|>\n",
        "<|im_start|>assistant\n%<|im_end|>\n",
        options.pop("prompt", "<|im_start|>assistant\n"),
        system="<|im_start|>system\n%<|im_end|>\n",
        tool="<|im_start|>user\n<tool_response>\n%\n</tool_response><|im_end|>\n",
        begin=f"{_LAST_USER}{options.pop('first', '')}{begin}",
        calls=_CALLS,
        **options,
    )


def llama3(begin: str = "", **options: str) -> str:
    """Of Llama 3: texts are trimmed."""
    head = "<|start_header_id|>{}<|end_header_id|>\n\n"
    return turns(
        head.format("user") + "%<|eot_id|>",
        head.format("assistant") + "%<|eot_id|>",
        head.format("assistant"),
        system=head.format("system") + "%<|eot_id|>",
        tool=head.format("ipython") + "%<|eot_id|>",
        begin="{{ bos_token }}" + begin,
        content="m.content | trim",
        answer="m.content | trim",
        calls='{% for call in m.tool_calls or [] %}{"name": "{{ call.function.name }}", '
        '"parameters": {{ call.function.arguments | tojson }}}{% endfor %}',
        **options,
    )


def mistral(space: str, begin: str = "", after: str = "") -> str:
    """Of Mistral: what stands before texts, and before the end of one."""
    return turns(
        f"[INST]{space}%{space}[/INST]",
        f"{after}%{{{{ eos_token }}}}",
        "",
        begin="{{ bos_token }}" + begin,
        tool='[TOOL_RESULTS]{"content": %}[/TOOL_RESULTS]',
        calls="{% if m.tool_calls %}[TOOL_CALLS]{{ m.tool_calls | tojson }}{% endif %}",
    )


def cohere(begin: str = "", end: str = "", after: str = "") -> str:
    """Of Cohere: roles are tokens."""
    turn = "<|START_OF_TURN_TOKEN|><|{}_TOKEN|>"
    return turns(
        turn.format("USER") + "%<|END_OF_TURN_TOKEN|>",
        turn.format("CHATBOT") + begin + "%" + end + "<|END_OF_TURN_TOKEN|>",
        turn.format("CHATBOT"),
        system=turn.format("SYSTEM") + "%<|END_OF_TURN_TOKEN|>",
        tool=turn.format("SYSTEM") + "<results>\n%</results><|END_OF_TURN_TOKEN|>",
        begin="{{ bos_token }}",
        content="m.content | trim",
        answer="m.content | trim",
    ).replace("{% if add_gen", after + "{% if add_gen")


_CHATML = ("<|im_end|>", "<|endoftext|>", "<|im_start|>")
_LLAMA3 = ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>")
_MISTRAL = ("</s>", "<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
_PHI = ("<|end|>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|im_sep|>")
_GLM = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>")
_TURN = ("<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>")
_COHERE = ("<|END_OF_TURN_TOKEN|>", "<BOS_TOKEN>", *_TURN)
_GEMMA = ("<end_of_turn>", "<bos>", "<eos>", "<start_of_turn>")
_GEMMA_TURNS = ("<start_of_turn>user\n%<end_of_turn>\n", "<start_of_turn>model\n%<end_of_turn>\n")
_DEEPSEEK = ("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
_GLM_TURNS = ("<|user|>\n%", "<|assistant|>\n%", "<|assistant|>")
_HARMONY = ("<|return|>", "<|startoftext|>", "<|start|>", "<|end|>", "<|channel|>", "<|message|>")
_KIMI = ("<|im_end|>", "[BOS]", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>")
_GRANITE = ("<|end_of_text|>", "<|begin|>", "<|start_of_role|>", "<|end_of_role|>")
_ROLE = "<|start_of_role|>{}<|end_of_role|>%<|end_of_text|>\n"

PUBLISHED = {
    "Llama 2": Published(
        turns(
            "{{ bos_token }}[INST] % [/INST]",
            " % {{ eos_token }}",
            "",
            content="m.content.strip()",
            answer="m.content.strip()",
        ),
        ("</s>", "<s>"),
        differs="white space",
    ),
    "Llama 3": Published(llama3(), _LLAMA3),
    "Llama 3.1": Published(
        llama3(
            "{% if tools %}<|start_header_id|>system<|end_header_id|>\n\n{{ tools | tojson }}"
            "<|eot_id|>{% endif %}"
        ),
        (*_LLAMA3, "<|eom_id|>", "<|end_of_text|>", "<|python_tag|>"),
        ends=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    ),
    "Mistral 7B 0.1": Published(mistral(" "), _MISTRAL),
    "Mistral 7B 0.3": Published(mistral(" ", after=" "), _MISTRAL, differs="white space"),
    "Mistral Nemo": Published(
        mistral(
            "", "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
        ),
        (*_MISTRAL, "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    ),
    "Mistral Small 3": Published(
        mistral("", "[SYSTEM_PROMPT]You are Mistral Small 3.[/SYSTEM_PROMPT]"),
        (*_MISTRAL, "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    ),
    "Qwen 2.5": Published(chatml("You are Qwen."), _CHATML, ends=("<|im_end|>", "<|endoftext|>")),
    "Qwen 3": Published(
        chatml(
            answer=f"({_DROPPED} if loop.index0 < ns.last else m.content)",
            first="{% if tools %}# Tools" + _TOOLS + "\n<tool_call>{% endif %}",
        ),
        _CHATML,
    ),
    "Qwen 3.5": Published(
        chatml(answer=_DROPPED, prompt="<|im_start|>assistant\n<think>\n"), _CHATML
    ),
    "SmolLM 2": Published(chatml("You are a helpful AI assistant named SmolLM."), _CHATML),
    "SmolLM 3": Published(
        chatml(first="<|im_start|>system\n## Metadata\n\nReasoning Mode: /think\n<|im_end|>\n"),
        _CHATML,
    ),
    "Hermes 3": Published(
        {
            "default": chatml("You are Hermes."),
            "tool_use": chatml(
                first="<|im_start|>system\n<tools>" + _TOOLS + "</tools><tool_call><|im_end|>\n"
            ),
        },
        _CHATML,
    ),
    "Gemma 2": Published(
        turns(
            *_GEMMA_TURNS,
            "<start_of_turn>model\n",
            begin="{{ bos_token }}",
            content="m.content | trim",
            answer="m.content | trim",
        ),
        _GEMMA,
        ends=("<eos>", "<end_of_turn>"),
    ),
    "Gemma 4": Published(
        turns(
            "<|turn>user\n%<turn|>\n",
            "<|turn>model\n%<turn|>\n",
            "<|turn>model\n",
            system="<|turn>system\n%<turn|>\n",
            begin="{{ bos_token }}",
            answer="m.content.split('<channel|>')[-1] | trim",
        ),
        ("<turn|>", "<bos>", "<|turn>", "<|channel>", "<channel|>"),
    ),
    "Phi 3": Published(
        turns(
            "<|user|>\n%<|end|>\n",
            "<|assistant|>\n%<|end|>\n",
            "<|assistant|>\n",
            system="<|system|>\n%<|end|>\n",
        )
        + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}",
        ("<|endoftext|>", "<s>", *_PHI),
        ends=("<|endoftext|>", "<|assistant|>", "<|end|>"),
    ),
    "Phi 4": Published(
        turns(
            "<|im_start|>user<|im_sep|>%<|im_end|>",
            "<|im_start|>assistant<|im_sep|>%<|im_end|>",
            "<|im_start|>assistant<|im_sep|>",
            system="<|im_start|>system<|im_sep|>%<|im_end|>",
        ),
        (*_CHATML, "<|im_sep|>"),
    ),
    "DeepSeek V3": Published(
        turns(
            "<｜User｜>%",
            "<｜Assistant｜>%<｜end▁of▁sentence｜>",
            "<｜Assistant｜>",
            system="%",
            begin="{{ bos_token }}",
        ),
        _DEEPSEEK,
    ),
    "DeepSeek R1": Published(
        turns(
            "<｜User｜>%",
            "<｜Assistant｜>%<｜end▁of▁sentence｜>",
            "<｜Assistant｜><think>\n",
            begin="{{ bos_token }}",
            answer="m.content.split('</think>')[-1]",
        ),
        _DEEPSEEK,
    ),
    "Command R7B": Published(
        cohere("<|START_RESPONSE|>", "<|END_RESPONSE|>")
        .replace(
            "{{ bos_token }}",
            "{{ bos_token }}<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|># Preamble<|END_OF_TURN_TOKEN|>",
        )
        .replace(
            "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
            "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
            "<|START_RESPONSE|>",
        ),
        (*_COHERE, "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    "Command R+": Published(
        {
            "default": cohere(),
            "tool_use": cohere(
                after="<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Write 'Action:' and "
                "one of" + _TOOLS + "<|END_OF_TURN_TOKEN|>"
            ),
        },
        _COHERE,
    ),
    "GLM 4": Published(
        turns(*_GLM_TURNS, system="<|system|>\n%", begin="[gMASK]<sop>"),
        (*_GLM, "<|observation|>"),
        ends=("<|endoftext|>", "<|user|>", "<|observation|>"),
        differs="white space",
    ),
    "GLM 4.5": Published(
        turns(
            "<|user|>\n%",
            "<|assistant|>\n<think></think>\n%",
            "<|assistant|>",
            tool="<|observation|>\n<tool_response>\n%\n</tool_response>",
            begin="[gMASK]<sop>",
            answer=f"({_DROPPED}).strip()",
        ),
        (*_GLM, "<|observation|>"),
        ends=("<|endoftext|>", "<|user|>", "<|observation|>"),
    ),
    "MiniMax M2": Published(
        turns(
            "]~b]user\n%[e~[\n",
            "]~b]ai\n%[e~[\n",
            "]~b]ai\n<think>\n",
            system="]~b]system\n%[e~[\n",
            begin="]~!b[",
            answer=_DROPPED,
        ),
        ("[e~[", "]~!b[", "]~b]"),
    ),
    "Kimi K2": Published(
        turns(
            "<|im_user|>user<|im_middle|>%<|im_end|>",
            "<|im_assistant|>assistant<|im_middle|>%<|im_end|>",
            "<|im_assistant|>assistant<|im_middle|>",
            system="<|im_system|>system<|im_middle|>%<|im_end|>",
            tool="<|im_system|>tool<|im_middle|>## Return of {{ m.tool_call_id }}\n%<|im_end|>",
        ),
        _KIMI,
    ),
    "gpt-oss": Published(
        turns(
            "<|start|>user<|message|>%<|end|>",
            "<|start|>assistant<|channel|>final<|message|>%"
            "{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>"
            "{% endif %}",
            "<|start|>assistant",
            system="<|start|>developer<|message|>%<|end|>",
        ),
        _HARMONY,
        differs="another end",
    ),
    "Granite 3": Published(
        turns(
            _ROLE.format("user"),
            _ROLE.format("assistant"),
            "<|start_of_role|>assistant<|end_of_role|>",
            system=_ROLE.format("system"),
        ),
        _GRANITE,
    ),
    "OLMo 2": Published(
        turns(
            "<|user|>\n%\n",
            "<|assistant|>\n%{{ eos_token }}{% if not loop.last %}\n{% endif %}",
            "<|assistant|>\n",
            system="<|system|>\n%\n",
            begin="{{ bos_token }}",
        ),
        ("<|endoftext|>", "<|begin|>"),
    ),
    "Zephyr": Published(
        turns(
            "<|user|>\n%{{ eos_token }}\n",
            "<|assistant|>\n%{{ eos_token }}\n",
            "<|assistant|>\n",
            system="<|system|>\n%{{ eos_token }}\n",
        ),
        ("</s>", "<s>"),
    ),
}


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """One token a byte, and the family's control tokens."""
    published = PUBLISHED[name]
    core = Tokenizer(
        models.BPE(
            {each: at for at, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []
        )
    )
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_tokens(
        [AddedToken(each, special=True, normalized=False) for each in published.special]
    )
    core.add_tokens([AddedToken(each, normalized=False) for each in published.words])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=published.special[0], bos_token=published.special[1]
    )
    tokenizer.chat_template = published.template
    return tokenizer
