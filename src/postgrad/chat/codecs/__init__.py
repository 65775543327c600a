"""Tool calls as text: how a call is written in an assistant turn, and how sampled text becomes calls again. One file per style.

    hermes        <tool_call>{"name": …, "arguments": {…}}</tool_call>
    llama3        {"name": …, "parameters": {…}}
    pythonic      [name(argument=value), …]
    mistral       [TOOL_CALLS] [{"name": …, "arguments": {…}}, …]
    mistral_v11   [TOOL_CALLS]name[ARGS]{…}
    deepseek_v3, deepseek_v31
    xml           <tool_call><function=name><parameter=key>value</parameter></function></tool_call>, a line each

1. Reading never raises. What stands where a call is written and is none becomes a `MalformedCall`, with an error that a model can act on.
   Arguments that are no JSON object (null, a list, a number, JSON inside a string) are such an error: nothing is repaired.
2. `read(write(content, calls), tools)` gives back content and calls, whatever the arguments hold.
3. The style of a chat template is found in what it prints for a probe call (`facts.call_style`). Where a template prints no tools,
   postgrad describes them in the system message (`describe_tools`) and writes the calls itself: the *text protocol*, in the style in which
   the template prints calls, or else in hermes style, unless the recipe names one.
"""

from __future__ import annotations

from postgrad.chat.codecs.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from postgrad.chat.codecs.describe import describe_tools
from postgrad.chat.codecs.hermes import HERMES
from postgrad.chat.codecs.llama3 import LLAMA3
from postgrad.chat.codecs.mistral import MISTRAL, MISTRAL_V11
from postgrad.chat.codecs.pythonic import PYTHONIC
from postgrad.chat.codecs.style import Call, CallStyle, CannotWrite, Parsed
from postgrad.chat.codecs.xml import XML

STYLES = {style.name: style for style in (HERMES, LLAMA3, PYTHONIC, MISTRAL, MISTRAL_V11, DEEPSEEK_V3, DEEPSEEK_V31, XML)}
RESULT_OPEN, RESULT_CLOSE = "<tool_response>", "</tool_response>"
"""Around a tool result in a user message, where the template has no role for it."""

__all__ = [
    "DEEPSEEK_V3",
    "DEEPSEEK_V31",
    "HERMES",
    "LLAMA3",
    "MISTRAL",
    "MISTRAL_V11",
    "PYTHONIC",
    "RESULT_CLOSE",
    "RESULT_OPEN",
    "STYLES",
    "XML",
    "Call",
    "CallStyle",
    "CannotWrite",
    "Parsed",
    "describe_tools",
]
