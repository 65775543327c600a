"""Chat templates in the ways that popular models have, written for these tests after their published formats."""

from __future__ import annotations

from typing import Any

from postgrad.chat import ChatFormat
from postgrad.testing import tiny_tokenizer

_TOOLS = "{% if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t | tojson + '\n' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
_ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
_TOOL_TURN = "{{ '<|im_start|>tool\n' + m.content + '<|im_end|>\n' }}"
_PLAIN_TURN = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"


def _calling(calls: str) -> str:
    """A template that prints an assistant turn as its content and `calls`."""
    turn = "{{ '<|im_start|>assistant\n' + m.content }}" + calls + "{{ '<|im_end|>\n' }}"
    return f"{_TOOLS}{{% for m in messages %}}{{% if m.tool_calls %}}{turn}{{% else %}}{_PLAIN_TURN}{{% endif %}}{{% endfor %}}{_ASK}"


HERMES = _calling(
    "{% for c in m.tool_calls %}{{ '\n<tool_call>\n{\"name\": ' + (c.function.name | tojson) + ', \"arguments\": ' }}"
    "{{- (c.function.arguments | tojson) + '}\n</tool_call>' }}{% endfor %}"
)
LLAMA3 = (
    _TOOLS + "{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('only single tool-calls at once') }}{% endif %}"
    "{% set f = m.tool_calls[0].function %}"
    "{{ '<|im_start|>assistant\n{\"name\": \"' + f.name + '\", \"parameters\": ' + (f.arguments | tojson) + '}<|im_end|>\n' }}"
    "{% else %}" + _PLAIN_TURN + "{% endif %}{% endfor %}" + _ASK
)
"""Prints no content beside a call, and refuses a second one."""
PYTHONIC = _calling(
    "{{ '<|tool_call_start|>[' }}{% for c in m.tool_calls %}{{ c.function.name + '(' }}"
    "{% for key, value in c.function.arguments.items() %}{{ key + '=' }}"
    "{% if value is string or value is mapping or value is iterable %}{{ value | tojson }}{% else %}{{ value | string }}{% endif %}"
    "{{ ', ' if not loop.last }}{% endfor %}{{ ')' + (', ' if not loop.last else '') }}{% endfor %}"
    "{{ ']<|tool_call_end|>' }}"
)
PYTHONIC_IN_QUOTES = _calling(
    "{{ '[' }}{% for c in m.tool_calls %}{{ c.function.name + '(' }}{% for key, value in c.function.arguments.items() %}"
    "{{ key + '=\"%s\"' | format(value) }}{{ ', ' if not loop.last }}{% endfor %}{{ ')' + (', ' if not loop.last else '') }}"
    "{% endfor %}{{ ']' }}"
)
"""Prints every value in quotes, whatever its type: an integer comes back as text."""
MISTRAL = (
    "{% if tools %}{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('call ids have nine characters') }}{% endif %}"
    "{{ ({'name': c.function.name, 'arguments': c.function.arguments, 'id': c.id} | tojson) + (']' if loop.last else ', ') }}"
    "{% endfor %}{{ eos_token }}"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('call ids have nine characters') }}{% endif %}"
    "{{ '[TOOL_RESULTS] ' + ({'content': m.content, 'call_id': m.tool_call_id} | tojson) + '[/TOOL_RESULTS]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
"""Prints no content beside calls, and wants an id for each call and result."""
MISTRAL_V11 = _calling(
    "{% for c in m.tool_calls %}{{ '[TOOL_CALLS]' + c.function.name + '[CALL_ID]' + c.id }}"
    "{{ '[ARGS]' + (c.function.arguments | tojson) }}{% endfor %}"
)
XML = _calling(
    "{% for c in m.tool_calls %}{{ '\n<tool_call>\n<function=' + c.function.name + '>\n' }}"
    "{% for key, value in c.function.arguments | items %}{{ '<parameter=' + key + '>\n' }}"
    "{{ (value if value is string else value | tojson) + '\n</parameter>\n' }}{% endfor %}{{ '</function>\n</tool_call>' }}{% endfor %}"
)


def _deepseek(call: str, between: str, *, tools: bool = True, opens: str = "", keeps: bool = False) -> str:
    """DeepSeek's way: no header between results and the next turn, arguments as JSON text, and thoughts dropped unless `keeps`."""
    told = "{% if tools %}{{ tools | tojson }}{% endif %}" if tools else ""
    content = "m.content" if keeps else "m.content.split('</think>')[-1]"
    return (
        told + "{% set ns = namespace(after_tool=false) %}{% for m in messages %}"
        "{% if m.role in ['user', 'system'] %}{{ '<｜' + m.role + '｜>' + m.content }}{% set ns.after_tool = false %}"
        "{% elif m.role == 'assistant' %}{{ '' if ns.after_tool else '<｜Assistant｜>' }}{{ "
        + content
        + " }}{% set ns.after_tool = false %}"
        "{% if m.tool_calls %}{{ '<｜tool▁calls▁begin｜>' }}{% for c in m.tool_calls %}"
        + call
        + "{{ '' if loop.last else '"
        + between
        + "' }}"
        "{% endfor %}{{ '<｜tool▁calls▁end｜>' }}{% endif %}{{ '<｜end▁of▁sentence｜>' }}"
        "{% else %}{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}{% set ns.after_tool = true %}{% endif %}"
        "{% endfor %}"
        "{% if add_generation_prompt and not ns.after_tool %}{{ '<｜Assistant｜>" + opens + "' }}{% endif %}"
    )


_V3_CALL = (
    "{{ '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + c.function.name }}"
    "{{ '\n```json\n' + c.function.arguments + '\n```<｜tool▁call▁end｜>' }}"
)
_V31_CALL = "{{ '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + c.function.arguments + '<｜tool▁call▁end｜>' }}"
DEEPSEEK_V3 = _deepseek(_V3_CALL, "\\n")
DEEPSEEK_V3_TOLD_NOTHING = _deepseek(_V3_CALL, "\\n", tools=False)
"""As the model was published: it prints calls, and no tools."""
DEEPSEEK_V31 = _deepseek(_V31_CALL, "")
DEEPSEEK_R1 = _deepseek(_V3_CALL, "\\n", opens="<think>\\n")
DEEPSEEK_R1_KEEPS = _deepseek(_V3_CALL, "\\n", opens="<think>\\n", keeps=True)

CALLING = {
    "hermes": HERMES,
    "llama3": LLAMA3,
    "pythonic": PYTHONIC,
    "mistral": MISTRAL,
    "mistral_v11": MISTRAL_V11,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "xml": XML,
}
"""By the style of its calls, a template that prints tools and calls itself."""

_QWEN_THOUGHT = (
    "{% set thought = m.reasoning_content or '' %}{% if KEPT and (loop.last or thought) %}"
    "{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}"
)


def _qwen3(kept: str) -> str:
    turn = (
        "{{ '<|im_start|>assistant\n' }}" + _QWEN_THOUGHT.replace("KEPT", kept) + "{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ '\n' if m.content or not loop.first }}{{ '<tool_call>\n{\"name\": ' }}"
        "{{ (c.function.name | tojson) + ', \"arguments\": ' + (c.function.arguments | tojson) + '}\n</tool_call>' }}{% endfor %}"
        "{{ '<|im_end|>\n' }}"
    )  # fmt: skip
    last_question = "{% for m in messages %}{% if m.role == 'user' %}{% set ns.question = loop.index0 %}{% endif %}{% endfor %}"
    turns = f"{{% for m in messages %}}{{% if m.role == 'assistant' %}}{turn}{{% else %}}{_PLAIN_TURN}{{% endif %}}{{% endfor %}}"
    return "{% set ns = namespace(question=-1) %}" + last_question + _TOOLS + turns + _ASK


QWEN3 = _qwen3("loop.index0 > ns.question")
"""Keeps the thoughts of a tool loop, and drops them once the user asks again."""
KEEPS_THOUGHTS = _qwen3("true")
DROPS_THOUGHTS = _qwen3("loop.last")
"""Prints the thought of the last turn alone, also inside a tool loop."""

MARKERS = (
    "<｜user｜>", "<｜system｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
    "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
    "<|tool_call_start|>", "<|tool_call_end|>",
)  # fmt: skip


def tokenizer_of(template: str, *, markers: tuple[str, ...] = MARKERS) -> Any:
    """A tokenizer with the markers of all these templates as special tokens."""
    tokenizer = tiny_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *markers]})
    return tokenizer


def format_of(template: str, *, markers: tuple[str, ...] = MARKERS, **options: Any) -> ChatFormat:
    return ChatFormat(tokenizer_of(template, markers=markers), **options)
