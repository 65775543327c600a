"""Public test doubles: what postgrad's own tests use, for yours."""

from postgrad.testing.tiny import ARCHITECTURES, CHATML, tiny_model, tiny_tokenizer

__all__ = ["ARCHITECTURES", "CHATML", "tiny_model", "tiny_tokenizer"]
