"""The tools of the shop: what one of a thing costs, and a calculator. The docstrings and the annotations are what the model is told."""

from __future__ import annotations

PRICES = {
    "lamp": 37, "kettle": 48, "umbrella": 26, "guitar": 94, "clock": 58, "radio": 67, "basket": 23, "mirror": 83, "blanket": 46,
    "jacket": 78, "hammer": 29, "ladder": 89, "pillow": 34, "carpet": 97, "helmet": 56, "backpack": 63, "teapot": 43, "vase": 38,
    "drum": 86, "tent": 92, "racket": 54, "scarf": 27, "toaster": 49, "fan": 64, "globe": 73, "printer": 98, "stool": 36, "shovel": 28,
    "camera": 96, "violin": 87, "wallet": 47, "candle": 24, "saddle": 93, "bottle": 32, "bench": 79, "puzzle": 39,
}  # fmt: skip


def price(item: str) -> int:
    """Look up what one of an item costs.

    Args:
        item: for example lamp
    """
    name = item.strip().lower()
    if name not in PRICES:
        raise ValueError(f"there is no {name!r} in the shop; ask for one thing, in the singular")
    return PRICES[name]


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b
