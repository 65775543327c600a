"""DeepSeek's two ways of writing a call; both put <｜tool▁calls▁begin｜> and <｜tool▁calls▁end｜> around all calls of a turn.

    deepseek_v3    <｜tool▁call▁begin｜>function<｜tool▁sep｜>name⏎```json⏎{…}⏎```<｜tool▁call▁end｜>    one a line; also R1
    deepseek_v31   <｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>

Source: the chat templates of DeepSeek-V3, DeepSeek-R1 and DeepSeek-V3.1.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from postgrad.chat.codecs.marked import NAME, Marks
from postgrad.chat.codecs.style import CallStyle
from postgrad.types import ToolCall

_AROUND = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_OPEN, _CLOSE, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_MARKERS = (*_AROUND, _OPEN, _CLOSE, _SEP)

_V3 = Marks(
    _OPEN,
    _CLOSE,
    head=re.compile(rf"\s*function{_SEP}(?P<name>{NAME})\s*```json\s*"),
    tail=re.compile(r"\s*```\s*"),
    around=_AROUND,
    form=f"{_OPEN}function{_SEP}name, a line ```json, the arguments as a JSON object, a line ```{_CLOSE}",
)
_V31 = Marks(
    _OPEN, _CLOSE, head=re.compile(rf"\s*(?P<name>{NAME})\s*{_SEP}"), around=_AROUND, form=f"{_OPEN}name{_SEP}{{arguments}}{_CLOSE}"
)


def write_v3(content: str, calls: Sequence[ToolCall]) -> str:
    return _V3.write(
        content, calls, lambda name, arguments: f"{_OPEN}function{_SEP}{name}\n```json\n{arguments}\n```{_CLOSE}", between="\n"
    )


def write_v31(content: str, calls: Sequence[ToolCall]) -> str:
    return _V31.write(content, calls, lambda name, arguments: f"{_OPEN}{name}{_SEP}{arguments}{_CLOSE}")


DEEPSEEK_V3 = CallStyle("deepseek_v3", write_v3, _V3.read, _MARKERS)
DEEPSEEK_V31 = CallStyle("deepseek_v31", write_v31, _V31.read, _MARKERS)
