"""Keeps transformers' progress bars and notices out of a command's output while it does what we asked for."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars, no log lines below ERROR and no warnings from transformers inside; its settings are restored after."""
    from transformers.utils import logging as module

    logging: Any = module
    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def no_gguf_bar() -> Iterator[None]:
    """transformers' GGUF reader draws a bar of its own that its settings do not reach."""
    from transformers import modeling_gguf_pytorch_utils as reader

    module: Any = reader
    bar = getattr(module, "tqdm", None)
    if bar is None:
        yield
        return
    module.tqdm = partial(bar, disable=True)
    try:
        yield
    finally:
        module.tqdm = bar
