"""Text to token ids and back, with the three rules that chat tokenising needs.

1. A special-token string that somebody typed stays text. Only the chat template writes special ids: content is *guarded* by a mark inside
   each typed special-token string, and the mark goes away when the piece of text is encoded.
2. A piece of text that continues another is encoded on its own, so that no token spans the boundary, and without the space that
   SentencePiece-style tokenizers put before the start of a text.
3. Where nobody typed a special-token string, the ids are exactly those of the plain tokenizer.

Most tokenizers are *separable*: they cut a text at special tokens first and encode what lies between on its own. Then so does this module,
and what lies between is often the same (`encoder`). For the others a piece without typed special strings is encoded whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from postgrad.chat.encoder import Encoder


class Tokenizer(Protocol):
    """What postgrad uses of a Hugging Face tokenizer."""

    @property
    def eos_token_id(self) -> int | None: ...
    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def unk_token_id(self) -> int | None: ...
    @property
    def special_tokens_map(self) -> Mapping[str, Any]: ...
    @property
    def chat_template(self) -> Any: ...
    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...
    def get_vocab(self) -> Mapping[str, int]: ...
    def encode(self, text: str, **options: Any) -> list[int]: ...
    def decode(self, token_ids: Any, **options: Any) -> Any: ...
    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


_MARKS = tuple(chr(point) for point in range(0xFDD0, 0xFDF0))  # noncharacters: Unicode keeps them free for private use inside a program
_ANCHORS = ("\n", "a", "!", "0", ")", "é")


class Tokens:
    """One tokenizer under the rules above. `special` maps each special-token string to its id."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._encoder = Encoder(tokenizer)
        added = tokenizer.added_tokens_decoder
        self.special: dict[str, int] = {str(token.content): index for index, token in added.items() if token.special}
        self._eats_right = frozenset(index for index, token in added.items() if token.special and token.rstrip)
        self._eats_left = frozenset(index for index, token in added.items() if token.special and token.lstrip)
        self.special_ids = frozenset(self.special.values())
        longest_first = sorted((text for text in self.special if len(text) > 1), key=len, reverse=True)
        self.special_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._around_special = re.compile(f"({self.special_pattern.pattern})")
        self._starts_with_space = self._ids("\nx")[len(self._ids("\n")) :] != self._ids("x")
        self._separable = not self._starts_with_space and _cuts_at_special(added.values(), self.special_pattern)
        self.bos_id = tokenizer.bos_token_id
        self.unk_id = tokenizer.unk_token_id
        self.adds_bos = self._opens_with_bos()

    # ---- encode

    def text(self, text: str) -> list[int]:
        """Ids of plain text; special-token strings in it stay text."""
        typed = self.special_pattern.search(text) is not None
        return self._ids(text, split_special_tokens=True) if typed else self._ids(text)

    def continuation(self, text: str) -> list[int]:
        """Ids of plain text that continues other text; special-token strings in it stay text."""
        return self._continue(text, split_special_tokens=self.special_pattern.search(text) is not None)

    def rendered(self, text: str, *, guard: Guard, continues: bool = False) -> list[int]:
        """Ids of a piece of rendered template: unguarded special-token strings become their ids, guarded ones stay text."""
        return self.rendered_many([([text], guard)])[0][0] if self._separable else self._rendered_whole(text, guard, continues)

    def rendered_many(self, rendered: Sequence[tuple[Sequence[str], Guard]]) -> list[list[list[int]]]:
        """Ids of the consecutive pieces of each rendered template, every piece encoded on its own.

        All in one call, where pieces can be told apart: a tokenizer works on the texts of one call with all its threads.
        """
        if not self._separable:
            return [[self._rendered_whole(text, guard, place > 0) for place, text in enumerate(texts)] for texts, guard in rendered]
        cut = [[self._around_special.split(text) for text in texts] for texts, _ in rendered]  # a special string at every second place
        plain: dict[bool, list[str]] = {False: [], True: []}
        for (_, guard), texts in zip(rendered, cut, strict=True):
            plain[bool(guard.mark)] += [guard.remove(piece) for pieces in texts for piece in pieces[::2]]
        coded = {split: iter(self._encoder.many(pieces, split=split)) for split, pieces in plain.items()}
        return [
            [self._joined(coded[bool(guard.mark)], pieces[1::2]) for pieces in texts]
            for (_, guard), texts in zip(rendered, cut, strict=True)
        ]

    def with_bos(self, ids: list[int]) -> list[int]:
        """`ids` with the beginning-of-sequence id that the tokenizer puts before a text, exactly once.

        A tokenizer that adds none (most chat tokenizers: their template writes it, or nothing does) gets none.
        """
        if not self.adds_bos:
            return ids
        bos: Any = self.bos_id
        start = next((index for index, token in enumerate(ids) if token != bos), len(ids))
        return [bos, *ids[start:]]

    # ---- decode

    def decode(self, ids: Sequence[int], *, keep: frozenset[int] = frozenset()) -> str:
        """Text of `ids` without special tokens, except those in `keep`."""
        dropped = self.special_ids - keep
        return self.decode_raw([token for token in ids if token not in dropped])

    def decode_raw(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def shown(self, text: str, *, keep: Iterable[str]) -> str:
        """Rendered text as `decode` gives it back: without the special-token strings that the template wrote, except those in `keep`."""
        kept = frozenset(keep)
        return self.special_pattern.sub(lambda match: match.group() if match.group() in kept else "", text)

    # ---- inside

    def _ids(self, text: str, *, split_special_tokens: bool = False) -> list[int]:
        return self._encoder.one(text, split=split_special_tokens)

    def _opens_with_bos(self) -> bool:
        """True when the tokenizer itself puts BOS before a text."""
        opening = self._tokenizer.encode("x", add_special_tokens=True, verbose=False)
        return self.bos_id is not None and opening[:1] == [self.bos_id] and self._ids("x")[:1] != [self.bos_id]

    def _joined(self, plain: Iterator[Sequence[int]], specials: Sequence[str]) -> list[int]:
        """The next ids of plain text, with those of these special strings between them."""
        ids = [*next(plain)]
        for special in specials:
            ids.append(self.special[special])
            ids += next(plain)
        return ids

    def _rendered_whole(self, text: str, guard: Guard, continues: bool) -> list[int]:
        if not guard.mark:
            return self._continue(text) if continues else self._ids(text)
        ids: list[int] = []
        for piece, special in self._split(text):
            if special is not None:
                ids.append(special)
                continues = True
            elif piece:
                plain = guard.remove(piece)
                ids += self._continue(plain, split_special_tokens=True) if continues else self._ids(plain, split_special_tokens=True)
                continues = True
        return ids

    def _continue(self, text: str, *, split_special_tokens: bool = False) -> list[int]:
        """Encode after an anchor and take the anchor's ids away: the tokenizer then does not see a start of text."""
        if not self._starts_with_space or not text or self.special_pattern.match(text):
            return self._ids(text, split_special_tokens=split_special_tokens)
        for anchor in _ANCHORS:
            before, both = self._ids(anchor), self._ids(anchor + text, split_special_tokens=split_special_tokens)
            if both[: len(before)] == before:
                return both[len(before) :]
        return self._ids(text, split_special_tokens=split_special_tokens)

    def _split(self, text: str) -> Iterator[tuple[str, int | None]]:
        """(text, None) and (special-token string, id) pieces in order; whitespace that a special token swallows is left out."""
        position, previous = 0, -1
        for match in self.special_pattern.finditer(text):
            special = self.special[match.group()]
            piece = text[position : match.start()]
            piece = piece.rstrip() if special in self._eats_left else piece
            yield piece.lstrip() if previous in self._eats_right else piece, None
            yield match.group(), special
            position, previous = match.end(), special
        rest = text[position:]
        yield rest.lstrip() if previous in self._eats_right else rest, None


class Guard:
    """Marks special-token strings inside content, so that rendered text shows which ones the template wrote.

    `mark` is "" when no content holds such a string: then nothing is changed anywhere.
    """

    def __init__(self, tokens: Tokens, *contents: Any) -> None:
        text = "\n".join(_strings(contents))
        self._pattern = tokens.special_pattern
        self.mark = next(mark for mark in _MARKS if mark not in text) if self._pattern.search(text) else ""

    def apply(self, content: Any) -> Any:
        """A copy of `content` (strings, lists, dicts) with a mark after the first character of every typed special-token string."""
        if not self.mark:
            return content
        if isinstance(content, str):
            while self._pattern.search(content):  # again when two of them overlapped
                content = self._pattern.sub(lambda match: match.group()[0] + self.mark + match.group()[1:], content)
            return content
        if isinstance(content, Mapping):
            return {self.apply(key): self.apply(value) for key, value in content.items()}
        if isinstance(content, (list, tuple)):
            return [self.apply(value) for value in content]
        return content

    def remove(self, text: str) -> str:
        return text.replace(self.mark, "") if self.mark else text


def _cuts_at_special(added: Iterable[Any], special: re.Pattern[str]) -> bool:
    """True when cutting a text at its special-token strings, found left to right and longest first, is what the tokenizer does.

    Not so where an added token depends on its surroundings (takes white space with it, wants a word border), where special tokens are
    looked for in normalized text, or where an ordinary added token could take a part of a special-token string.
    """
    tokens = list(added)
    if any(token.single_word or (token.special and (token.lstrip or token.rstrip or token.normalized)) for token in tokens):
        return False
    beginnings = {str(token.content)[:length] for token in tokens if token.special for length in range(1, len(str(token.content)) + 1)}
    ordinary = [str(token.content) for token in tokens if not token.special]
    return not any(special.search(text) or any(text[start:] in beginnings for start in range(1, len(text))) for text in ordinary)


def _strings(content: Any) -> list[str]:
    """Every string in lists and dicts within each other; of dicts the keys too."""
    found: list[str] = []
    waiting = [content]
    while waiting:
        part = waiting.pop()
        if isinstance(part, str):
            found.append(part)
        elif isinstance(part, (list, tuple)):
            waiting += part
        elif isinstance(part, Mapping):
            waiting += part
            waiting += part.values()
    return found
