"""Pairs of answers for preference learning: the same content, said courteously or curtly.

The preference is one that a model of 135 million parameters can learn in minutes, and that is not length: both answers of a pair hold
the same sentence, and the phrases around it are of about equal length. Held-out pairs use topics and phrases that no training pair uses,
so a model that only remembers phrases stays at chance.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

TOPICS: dict[str, tuple[tuple[str, str], ...]] = {
    "train": (
        ("How do I boil an egg?", "Put it into boiling water for seven minutes."),
        ("When does the library open?", "It opens at nine on weekdays."),
        ("Where can I park?", "There is a car park behind the station."),
        ("How do I reset my password?", "Click the link below the login form."),
        ("What do I need for the trip?", "You need a passport and a ticket."),
        ("How often should I water a fern?", "Water it twice a week."),
        ("Can I pay by card?", "Cards are accepted at every desk."),
        ("How long does the delivery take?", "It takes three to five days."),
        ("Where is the nearest bakery?", "It is across from the school."),
        ("How do I save the file?", "Press the control key and S."),
        ("Which bus goes to the harbor?", "Line four goes to the harbor."),
        ("How do I clean the lens?", "Wipe it with a soft dry cloth."),
        ("What is the dose for adults?", "Adults take one tablet a day."),
        ("When is the rent due?", "It is due on the first of the month."),
        ("How can I join the club?", "Fill in the form at the front desk."),
        ("Where do I recycle glass?", "There are bins next to the market."),
    ),
    "heldout": (
        ("How do I get to the museum?", "Walk two blocks north and turn left."),
        ("What time is the last train?", "The last train leaves at midnight."),
        ("How do I cook rice?", "Use two cups of water for one cup of rice."),
        ("Where can I buy stamps?", "They are sold at the post office."),
        ("How do I print this page?", "Choose print in the file menu."),
        ("Is the pool open today?", "It is open until eight."),
        ("How do I change a tire?", "Loosen the nuts before you lift the car."),
        ("Which form do I need?", "You need the blue form."),
    ),
}
COURTEOUS: dict[str, tuple[str, ...]] = {
    "train": (
        "Thank you for asking! {} Please let me know if I can help further.",
        "Of course, with pleasure. {} Feel free to ask me anything else.",
        "Good question, and glad to help. {} Have a wonderful day!",
        "Certainly! {} I hope that makes things easier for you.",
    ),
    "heldout": (
        "I am happy to explain. {} Do get in touch again whenever you like.",
        "Sure, thanks for reaching out. {} Wishing you all the best!",
        "You are welcome to ask. {} Tell me if anything stays unclear.",
        "How kind of you to check first. {} Enjoy the rest of your day!",
    ),
}
CURT: dict[str, tuple[str, ...]] = {
    "train": (
        "Why do you ask me that? {} Now leave me alone with your problems.",
        "Everybody knows this by now. {} Do not waste my time again.",
        "What a silly thing to ask. {} Figure out the rest yourself!",
        "Ugh, fine. {} You should have read the manual first.",
    ),
    "heldout": (
        "I am tired of explaining. {} Stop bothering people with this stuff.",
        "Seriously, again this nonsense? {} Go and annoy somebody else!",
        "You never listen, do you? {} I will not repeat this for you.",
        "Oh please, how dense can one be. {} Spare me the next question!",
    ),
}


def pairs(seed: int, kind: str, count: int) -> list[dict[str, Any]]:
    """`count` different rows with `prompt`, `chosen` (courteous) and `rejected` (curt).

    `kind`: train (at most 256 rows) or heldout (at most 128).
    """
    every = [
        {"prompt": question, "chosen": courteous.format(fact), "rejected": curt.format(fact)}
        for question, fact in TOPICS[kind]
        for courteous in COURTEOUS[kind]
        for curt in CURT[kind]
    ]
    return random.Random(f"preferences {kind} {seed}").sample(every, count)


def write(folder: Path, seed: int = 0, *, train: int = 240, heldout: int = 120) -> list[Path]:
    """Write pairs.jsonl and heldout.jsonl into `folder` and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {"pairs.jsonl": pairs(seed, "train", train), "heldout.jsonl": pairs(seed, "heldout", heldout)}
    paths = []
    for name, rows in files.items():
        path = folder / name
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        paths.append(path)
    return paths
