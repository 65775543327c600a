"""Rows in the formats people have, to conversations, to tokens with train flags. Imports no torch."""

from postgrad.data.files import Rejected, Row
from postgrad.data.prompts import PromptData, prepare_prompts
from postgrad.data.report import DataReport, Lengths
from postgrad.data.rows import RowSet, load_rows, rows_from
from postgrad.data.sft import SFTData, prepare_sft

__all__ = [
    "DataReport", "Lengths", "PromptData", "Rejected", "Row", "RowSet", "SFTData",
    "load_rows", "prepare_prompts", "prepare_sft", "rows_from",
]  # fmt: skip
