"""Chat templates that come with postgrad, for tokenizers that have none. Each is Jinja text under a name."""

from __future__ import annotations

CHATML = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + (turn_end | default('<|im_end|>')) + '\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
"""Ends each turn with `<|im_end|>`, or with the tokenizer's own end token where it has no such token (`turn_end`)."""

BUILT_IN: dict[str, str] = {"chatml": CHATML}
