"""Conversations to tokens and sampled tokens to turns, for any Hugging Face chat template. Imports neither torch nor transformers."""

from postgrad.chat.encoded import EncodedConversation, Printed, TokenSource
from postgrad.chat.format import ChatFormat, ToolProtocol
from postgrad.chat.reading import ParsedTurn
from postgrad.chat.render import TemplateRefuses
from postgrad.chat.templates import BUILT_IN
from postgrad.chat.tokens import Tokenizer
from postgrad.chat.turns import TemplateRewritesHistory

__all__ = [
    "BUILT_IN",
    "ChatFormat",
    "EncodedConversation",
    "ParsedTurn",
    "Printed",
    "TemplateRefuses",
    "TemplateRewritesHistory",
    "TokenSource",
    "Tokenizer",
    "ToolProtocol",
]
