"""Things of different sizes into as few bins as possible, none of them split: rows into a step, units into a micro-batch."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence


def fill(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of indices, each with sizes that add up to `capacity` at most; a size above it gets a bin of its own.

    Best fit, largest first, ties in input order: each goes into the fullest bin that has room. At most 11/9 of the fewest bins possible,
    plus one (Johnson 1973). Every index comes once.

    >>> fill([5, 3, 4, 2, 6], capacity=10)
    [[4, 2], [0, 1, 3]]
    """
    bins: list[list[int]] = []
    with_room: dict[int, list[int]] = defaultdict(list)
    rooms: list[int] = []
    """Sorted rooms that some bin has; at most `capacity` different ones, so looking one up is cheap for any number of bins."""

    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        size = sizes[index]
        place = bisect_left(rooms, size)
        if place == len(rooms):
            number, room = len(bins), capacity
            bins.append([])
        else:
            room = rooms[place]
            number = with_room[room].pop()
            if not with_room[room]:
                del rooms[place]
        bins[number].append(index)
        left = max(room - size, 0)
        if left and not with_room[left]:
            insort(rooms, left)
        with_room[left].append(number)
    return bins
