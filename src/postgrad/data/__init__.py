"""Rows in the formats people have, to conversations, to tokens with train flags; and what a user must know about them. Imports no torch."""

from postgrad.data.audit import Finding, overlap
from postgrad.data.cache import Cache
from postgrad.data.check import Reading, audit
from postgrad.data.files import Rejected, Row
from postgrad.data.pipeline import DEFAULT_WORK, Work
from postgrad.data.preferences import LabelledAnswer, Pair, PreferenceData, UnpairedData, prepare_preferences, prepare_unpaired
from postgrad.data.prompts import PromptData, prepare_prompts
from postgrad.data.report import DataReport, Lengths
from postgrad.data.sft import SFTData, prepare_sft
from postgrad.data.sources import RowSource, load_rows, mix, rows_from

__all__ = [
    "DEFAULT_WORK",
    "Cache",
    "DataReport",
    "Finding",
    "LabelledAnswer",
    "Lengths",
    "Pair",
    "PreferenceData",
    "PromptData",
    "Reading",
    "Rejected",
    "Row",
    "RowSource",
    "SFTData",
    "UnpairedData",
    "Work",
    "audit",
    "load_rows",
    "mix",
    "overlap",
    "prepare_preferences",
    "prepare_prompts",
    "prepare_sft",
    "prepare_unpaired",
    "rows_from",
]  # fmt: skip
