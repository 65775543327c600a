"""Public test doubles: what postgrad's own tests use, for yours."""

from postgrad.testing.scripted import ScriptedPolicy
from postgrad.testing.tiny import ARCHITECTURES, CHATML, tiny_model, tiny_tokenizer

__all__ = ["ARCHITECTURES", "CHATML", "ScriptedPolicy", "tiny_model", "tiny_tokenizer"]
