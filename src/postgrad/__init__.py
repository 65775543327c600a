"""postgrad: LLM post-training that you can trust, read and run. Importing it does not import torch."""

__version__ = "0.1.0"
