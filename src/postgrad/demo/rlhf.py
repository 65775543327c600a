"""The data of the RLHF chapter: short questions with the sentence to pass on, and answers that say it courteously or curtly.

1. `demonstrations`   SFT conversations, half of them courteous and half curt: the SFT model then samples both.
2. `prompts`          questions alone. Those of `heldout` have other wordings and other subjects than any that is trained on.
3. `write`            both as JSON lines, with `annotator.py`.

The phrases around the sentence are those of the preference chapter: courteous and curt ones are about equally long.
Every choice comes from a generator made from the seed.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from postgrad.demo.preferences import COURTEOUS, CURT

ASKED = "Pass this on to a customer.\nQuestion: {question}\nAnswer: {fact}"

WORDINGS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "train": (
        ("When does the {place} open?", "It opens at {hour}."),
        ("Where is the {place}?", "It is {where}."),
        ("How much is the {thing}?", "It costs {count} dollars."),
        ("Who can repair my {thing}?", "Ask at the {place}."),
        ("How do I get to the {place}?", "Take bus {count}."),
        ("Is there a {thing} at the {place}?", "Yes, {where}."),
    ),
    "heldout": (
        ("May I take my {thing} into the {place}?", "You may, after {hour}."),
        ("What became of the {thing} I lost?", "We found it {where}."),
        ("Which bus leaves from the {place}?", "Line {count} does."),
        ("How long is the {place} closed?", "For {count} more days."),
    ),
}
WORDS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "train": {
        "place": (
            "library", "museum", "bakery", "station", "post office", "garden", "town hall", "market", "gym", "pharmacy",
        ),
        "thing": ("lamp", "bicycle", "umbrella", "guitar", "kettle", "map", "radio", "suitcase", "clock", "printer"),
        "where": ("behind the school", "next to the bank", "on the second floor", "across from the church", "near the bridge"),
    },
    "heldout": {
        "place": ("harbor", "theater", "clinic", "swimming pool", "stadium", "zoo"),
        "thing": ("camera", "violin", "helmet", "wallet", "scarf", "phone"),
        "where": ("under the stairs", "at the north gate", "in the blue hall", "beside the fountain", "in the last row"),
    },
}  # fmt: skip
HOURS = ("six", "seven", "eight", "nine", "ten", "noon")


def prompts(seed: int, kind: str, count: int) -> list[dict[str, Any]]:
    """`count` different rows with `prompt` (one user message), `question` and `fact`; the wordings in turn. `kind`: train or heldout."""
    rng = random.Random(f"rlhf {kind} {seed}")
    rows: dict[str, dict[str, Any]] = {}
    while len(rows) < count:
        row = _filled(rng, kind, WORDINGS[kind][len(rows) % len(WORDINGS[kind])])
        rows.setdefault(row["prompt"][0]["content"], row)
    return list(rows.values())


def _filled(rng: random.Random, kind: str, wording: tuple[str, str]) -> dict[str, Any]:
    words: dict[str, Any] = {name: rng.choice(choices) for name, choices in WORDS[kind].items()}
    words |= {"hour": rng.choice(HOURS), "count": rng.randint(2, 60)}
    question, fact = (text.format(**words) for text in wording)
    return {"prompt": [{"role": "user", "content": ASKED.format(question=question, fact=fact)}], "question": question, "fact": fact}


def demonstrations(seed: int, count: int) -> list[dict[str, Any]]:
    """`count` rows with `messages`, to questions of the trained kind: half courteous, half curt, every phrase about equally often."""
    rng = random.Random(f"rlhf demonstrations {seed}")
    phrases = [phrase for tone in (COURTEOUS, CURT) for phrase in (*tone["train"], *tone["heldout"])]
    rounds = -(-count // len(phrases))
    chosen = [phrase for _ in range(rounds) for phrase in rng.sample(phrases, len(phrases))][:count]
    return [
        {"messages": [*row["prompt"], {"role": "assistant", "content": phrase.format(row["fact"])}]}
        for row, phrase in zip(prompts(seed, "train", count), chosen, strict=True)
    ]


def write(folder: Path, seed: int = 0, *, sft: int = 240, train: int = 240, heldout: int = 120) -> list[Path]:
    """Write sft.jsonl, prompts.jsonl, heldout.jsonl and annotator.py into `folder` and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "sft.jsonl": demonstrations(seed, sft),
        "prompts.jsonl": prompts(seed + 1, "train", train),
        "heldout.jsonl": prompts(seed, "heldout", heldout),
    }
    for name, rows in files.items():
        (folder / name).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    script = Path(shutil.copyfile(Path(__file__).with_name("annotator.py"), folder / "annotator.py"))
    return [*(folder / name for name in files), script]
