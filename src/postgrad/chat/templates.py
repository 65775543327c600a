"""Chat templates that come with postgrad, for tokenizers that have none. Each is Jinja text under a name.

    name     system text                     tools printed by the template      ends a turn with
    chatml   its own turn                    none (postgrad's text protocol)    <|im_end|>
    qwen     its own turn                    hermes style, as Qwen2.5 does      <|im_end|>
    llama3   its own turn                    JSON calls, as Llama 3.1 does      <|eot_id|>
    mistral  before the first user text      none (postgrad's text protocol)    the tokenizer's end token
    gemma    before the first user text      none (postgrad's text protocol)    <end_of_turn>

They follow the published formats with three differences: content is printed as it is (the originals trim), no default system prompt and no
date are added, and no earlier turn is ever printed differently once later turns follow. A conversation that a format cannot hold is refused
in words (`raise_exception`), never bent.

Where the tokenizer lacks the token that ends a turn in this style, `built_in` lets turns end with the tokenizer's own end token instead.
"""

from __future__ import annotations

from collections.abc import Container

_FIRST_LINE = "{%- set turn_end = TURN_END -%}"

_CHATML = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + turn_end + '\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)

_QWEN = (
    "{%- set opens_with_system = messages and messages[0].role == 'system' -%}"
    "{%- if tools -%}"
    "{{- '<|im_start|>system\\n' + (messages[0].content + '\\n\\n' if opens_with_system else '') -}}"
    "{{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' -}}"
    "{{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' -}}"
    "{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}"
    "{{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within ' -}}"
    "{{- '<tool_call></tool_call> XML tags:\\n<tool_call>\\n' -}}"
    "{{- '{\"name\": <function-name>, \"arguments\": <args-json-object>}\\n</tool_call>' + turn_end + '\\n' -}}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if message.role == 'tool' -%}"
    "{%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}"
    "{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}"
    "{%- if loop.last or loop.nextitem.role != 'tool' -%}{{- turn_end + '\\n' -}}{%- endif -%}"
    "{%- elif not (tools and loop.first and opens_with_system) -%}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content -}}"
    "{%- for call in message.tool_calls or [] -%}"
    "{{- '\\n' if message.content or not loop.first else '' -}}"
    "{{- '<tool_call>\\n{\"name\": ' + (call.function.name | tojson) + ', \"arguments\": ' -}}"
    "{{- (call.function.arguments | tojson) + '}\\n</tool_call>' -}}"
    "{%- endfor -%}"
    "{{- turn_end + '\\n' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)

_LLAMA3 = (
    "{{- bos_token -}}"
    "{%- set opens_with_system = messages and messages[0].role == 'system' -%}"
    "{%- if tools -%}"
    "{{- '<|start_header_id|>system<|end_header_id|>\\n\\nEnvironment: ipython\\n\\n' -}}"
    "{{- 'You have access to the following functions. To call one, answer with nothing but a JSON object of the form ' -}}"
    '{{- \'{"name": function name, "parameters": dictionary of argument names and values}. Do not use variables.\' -}}'
    "{%- for tool in tools -%}{{- '\\n\\n' + (tool | tojson) -}}{%- endfor -%}"
    "{{- ('\\n\\n' + messages[0].content if opens_with_system else '') + turn_end -}}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if not (tools and loop.first and opens_with_system) -%}"
    "{{- '<|start_header_id|>' + ('ipython' if message.role == 'tool' else message.role) + '<|end_header_id|>\\n\\n' -}}"
    "{%- if message.tool_calls -%}"
    "{%- if message.content -%}"
    "{{- raise_exception('a llama3 turn is either text or calls, and this one has both') -}}"
    "{%- endif -%}"
    "{%- for call in message.tool_calls -%}"
    "{{- '; ' if not loop.first else '' -}}"
    "{{- '{\"name\": ' + (call.function.name | tojson) + ', \"parameters\": ' + (call.function.arguments | tojson) + '}' -}}"
    "{%- endfor -%}"
    "{%- else -%}{{- message.content -}}{%- endif -%}"
    "{{- turn_end -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}"
)

_FOLD_SYSTEM = (
    "{%- set system = namespace(text='') -%}"
    "{%- for message in messages -%}"
    "{%- if message.role == 'system' -%}"
    "{%- if not loop.first or loop.last or loop.nextitem.role != 'user' -%}"
    "{{- raise_exception('a system message must stand first, before a user message') -}}"
    "{%- endif -%}"
    "{%- set system.text = message.content + '\\n\\n' if message.content else '' -%}"
    "{%- elif message.role not in ['user', 'assistant'] -%}"
    "{{- raise_exception('this format has no role ' + message.role) -}}"
    "{%- else -%}"
    "TURN"
    "{%- set system.text = '' -%}"
    "{%- endif -%}"
    "{%- endfor -%}"
)
"""Turns of formats with two roles; `system.text` belongs before the text of a user turn."""

_MISTRAL = "{{- bos_token -}}" + _FOLD_SYSTEM.replace(
    "TURN",
    "{%- if message.role == 'user' -%}{{- '[INST]' + system.text + message.content + '[/INST]' -}}"
    "{%- else -%}{{- message.content + turn_end -}}{%- endif -%}",
)
"""Without spaces around the markers, as the newer (tekken) tokenizers of Mistral print it."""

_GEMMA = (
    "{{- bos_token -}}"
    + _FOLD_SYSTEM.replace(
        "TURN",
        "{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\\n' -}}"
        "{{- system.text + message.content + turn_end + '\\n' -}}",
    )
    + "{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}"
)

_STYLES = {
    "chatml": (_CHATML, "<|im_end|>"),
    "qwen": (_QWEN, "<|im_end|>"),
    "llama3": (_LLAMA3, "<|eot_id|>"),
    "mistral": (_MISTRAL, ""),
    "gemma": (_GEMMA, "<end_of_turn>"),
}


def _source(body: str, end: str) -> str:
    return _FIRST_LINE.replace("TURN_END", f"'{end}'" if end else "eos_token | default('')") + body


BUILT_IN: dict[str, str] = {name: _source(*style) for name, style in _STYLES.items()}


def built_in(name: str, special: Container[str], eos: str) -> tuple[str, str]:
    """(Jinja text of a built-in template for a tokenizer with these special-token strings and end token, a note for the user or "").

    Turns end with the style's own token where the tokenizer has it, else with `eos`; with neither, no turn has an end and `ChatFormat`
    refuses to train on it.
    """
    body, end = _STYLES[name]
    if not end or end in special or not eos:
        return BUILT_IN[name], ""
    return _source(body, ""), f"the tokenizer has no {end}: in the built-in template {name} its own end token {eos} ends every turn"
