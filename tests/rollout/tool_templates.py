"""Chat templates of families that have tools, short, as their documentation describes them."""

from __future__ import annotations

from dataclasses import dataclass

from tests.rollout.chat_models import LLAMA3, SPECIAL

_SCHEMAS = "{% for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}"
_CHATML_END = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_HERMES_TOOLS = (
    "{% if tools %}<|im_start|>system\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    f"# Tools\n\n<tools>{_SCHEMAS}\n</tools>\n\nCall as <tool_call>...</tool_call><|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}"
    "<|im_end|>\n{% endif %}"
)
_RESULTS_AS_USER = (
    "{% elif m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)
_PLAIN = (
    "{% for m in messages %}{% if m.role == 'system' %}{% if not loop.first %}"
    "{{ raise_exception('system comes first') }}{% endif %}"
    "{% elif m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content }}"
)
QWEN = (
    _HERMES_TOOLS + _PLAIN + "{% for call in m.tool_calls or [] %}"
    "{% if not loop.first or m.content %}{{ '\\n' }}{% endif %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n"
    + _RESULTS_AS_USER
    + "{% endif %}{% endfor %}"
    + _CHATML_END
)
QWEN_DROPS_REASONING = QWEN.replace(
    "<|im_start|>assistant\n{{ m.content }}",
    "<|im_start|>assistant\n{% set ns = namespace(last=-1) %}{% for each in messages %}"
    "{% if each.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% if loop.index0 < ns.last %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m.content }}{% endif %}",
)
QWEN_CODER = (
    _HERMES_TOOLS.replace("<tool_call>...</tool_call>", "<tool_call>\n<function=NAME>...")
    + _PLAIN
    + "{% for call in m.tool_calls or [] %}"
    "{% if not loop.first or m.content %}{{ '\\n' }}{% endif %}"
    "<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for key, value in call.function.arguments.items() %}<parameter={{ key }}>\n"
    "{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}<|im_end|>\n"
    + _RESULTS_AS_USER
    + "{% endif %}{% endfor %}"
    + _CHATML_END
)
GLM = (
    "[gMASK]{% if tools %}<|system|>\n# Tools\n<tools>"
    + _SCHEMAS
    + "\n</tools>\n<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>...{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}"
    "{% elif m.role == 'system' %}<|system|>\n{{ m.content }}"
    "{% elif m.role == 'assistant' %}<|assistant|>\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}\n<tool_call>{{ call.function.name }}\n"
    "{% for key, value in call.function.arguments.items() %}<arg_key>{{ key }}</arg_key>\n"
    "<arg_value>{{ value if value is string else value | tojson }}</arg_value>\n{% endfor %}"
    "</tool_call>{% endfor %}"
    "{% elif m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% set ns = namespace(told=false) %}{% for m in messages %}"
    "{% if m.role == 'user' and tools and not ns.told %}{% set ns.told = true %}"
    "<|start_header_id|>user<|end_header_id|>\n\nGiven the following functions, respond with "
    'JSON: {"name": function name, "parameters": dictionary}.' + _SCHEMAS + "\n\n"
    "{{ m.content | trim }}<|eot_id|>"
    "{% elif m.role == 'assistant' and m.tool_calls %}"
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at once') }}{% endif %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
    "{{ m.tool_calls[0].function.arguments | tojson }}}<|eot_id|>"
    "{% elif m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n"
    "{{ m.content }}<|eot_id|>{% else %}"
    "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
    "{% endif %}{% endfor %}{# <|python_tag|> begins calls of built-in tools #}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_MISTRAL = (
    "{{ bos_token }}{% set ns = namespace(last=0) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.index0 == ns.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}"
    "[/AVAILABLE_TOOLS]{% endif %}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}"
    "{% if (m.tool_call_id | length) != 9 %}{{ raise_exception('ids have 9 characters') }}"
    '{% endif %}[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": '
    '"{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% elif m.role == 'assistant' and m.tool_calls %}CALLS{{ eos_token }}"
    "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
    "{% else %}{{ raise_exception('unknown role') }}{% endif %}{% endfor %}"
)
MISTRAL = _MISTRAL.replace(
    "CALLS",
    "[TOOL_CALLS] [{% for call in m.tool_calls %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, '
    '"id": "{{ call.id }}"}{% if not loop.last %}, {% endif %}{% endfor %}]',
)
MISTRAL_NAMED = _MISTRAL.replace(
    "CALLS",
    "{% for call in m.tool_calls %}[TOOL_CALLS]{{ call.function.name }}[ARGS]"
    "{{ call.function.arguments | tojson }}{% endfor %}",
)
PHI4 = (
    "{% if tools %}<|system|>You help.<|tool|>{{ tools | tojson }}<|/tool|><|end|>{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}"
    "<|assistant|><|tool_call|>[{% for call in m.tool_calls %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]<|/tool_call|><|end|>"
    "{% else %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}"
    "{% endfor %}{% if tools %}\n\n## Tools\n" + _SCHEMAS + "\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<｜Assistant｜></think>{{ m.content }}"
    "{% if m.tool_calls %}<｜tool▁calls▁begin｜>{% for call in m.tool_calls %}"
    "<｜tool▁call▁begin｜>{{ call.function.name }}<｜tool▁sep｜>"
    "{{ call.function.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>"
    "{% endif %}<｜end▁of▁sentence｜>"
    "{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜></think>{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """format: that must be found. special: tokens of the vocabulary, those that end and begin a
    text first. parallel: whether an answer may hold several calls."""

    template: str
    format: str
    special: tuple[str, ...] = SPECIAL
    parallel: bool = True


_MISTRAL_SPECIAL = (
    *("</s>", "<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
)
_PHI_SPECIAL = (
    *("<|endoftext|>", "<|bos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    *("<|tool|>", "<|/tool|>", "<|tool_call|>", "<|/tool_call|>"),
)
_DEEPSEEK_SPECIAL = (
    *("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
)
FAMILIES = {
    "Qwen, Hermes, SmolLM3, EXAONE": Family(QWEN, "hermes"),
    "Qwen3, which drops reasoning": Family(QWEN_DROPS_REASONING, "hermes"),
    "Qwen3 coder": Family(QWEN_CODER, "qwen_xml"),
    "GLM 4.5": Family(GLM, "glm", (*SPECIAL, "<|user|>", "<|assistant|>", "<|observation|>")),
    "Llama 3": Family(LLAMA, "llama3", (*SPECIAL, "<|python_tag|>"), parallel=False),
    "Mistral 0.3": Family(MISTRAL, "mistral", _MISTRAL_SPECIAL),
    "Ministral": Family(MISTRAL_NAMED, "mistral_named", _MISTRAL_SPECIAL),
    "Phi 4 mini": Family(PHI4, "phi4", _PHI_SPECIAL),
    "DeepSeek V3.1": Family(DEEPSEEK, "deepseek", _DEEPSEEK_SPECIAL),
    "SmolLM2, which knows no tools": Family(
        "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        + _CHATML_END,
        "hermes",
    ),
    "Llama without tools": Family(LLAMA3, "hermes"),
    "Gemma, which knows neither tools nor a system": Family(
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}"
        "{{ raise_exception('no system') }}{% endif %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}"
        "{% endif %}<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>model\n{% endif %}",
        "hermes",
    ),
}
