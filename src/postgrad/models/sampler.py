"""The in-process sampler: token ids in, sampled ids and their log-probs out.

    generate:  check every request  →  open contexts  →  [ pick one token a row  →  finished?  →  step the others ]  →  completions

1. A sample depends on the weights, its context, its key and its turn. Noise is a function of those alone (`noise`), and a row's
   logits hardly depend on the other rows: flat rows are never padded to each other, and on CPUs with oneDNN or MKL every row of a
   matrix product is computed alike. What remains is rounding (about 1e-7 relative in fp32): a token changes with probability of
   that order.
2. Rollouts that start with the same context share one copy of its keys and values; the next turn of a rollout continues its cache.
3. Finished rows leave the flat row at once; their place in the cache's blocks is reclaimed when half of it is unused.
4. Weights that changed are noticed (`serving.fingerprint`): every cache is then dropped and a copy of the weights made anew. `forget`
   drops both in any case, so that a copy takes no memory while the model is trained.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from postgrad.errors import ModelError, RunError
from postgrad.models.attention import pretrained
from postgrad.models.capability import check_head, packed_refusal
from postgrad.models.decode import CacheDecoder, Decoder, FlatDecoder, common_start
from postgrad.models.noise import TurnNoise
from postgrad.models.picking import check_params, pick
from postgrad.models.serving import Serving, fingerprint, refuse_laid_out
from postgrad.models.stopping import Decode, StopRule
from postgrad.protocols import Answer, Completion, Finish, SampleKey, SamplingParams, TurnRequest

Progress = Callable[[int, int], None]
"""Called after every decode step with (tokens sampled in this stream so far, rows still being sampled)."""
_PATIENCE = 4
"""Decode steps after which requests that all fit are opened, however few they are."""


@dataclass(eq=False)
class _Turn:
    """One request while it is being answered."""

    request: TurnRequest
    max_tokens: int
    noise: TurnNoise
    row: Any = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Finish | None = None

    def completion(self) -> Completion:
        assert self.finish is not None
        return Completion(tuple(self.tokens), tuple(self.logprobs), self.finish)

    def __str__(self) -> str:
        key = self.request.key
        return f"step {key.step}, prompt {key.prompt}, sample {key.sample}, turn {self.request.turn}"


class LocalSampler:
    """Samples from a transformers model in this process. Implements `protocols.Sampler`.

    model:       a causal language model of transformers, or a peft wrapper around one. It is read, never changed (but see `owned`).
    decode:      token ids -> text, for stop strings. They are searched in what it returns, special tokens as it renders them.
    dtype:       None samples with the live weights as they are. Otherwise with a copy in that dtype, made when it is needed
                 (`serving.serving_dtype` knows which pays).
    owned:       nobody else uses the model: with a dtype it is laid out in place, not copied, and can then be neither trained nor saved.
    max_batch:   rows decoded at once. More requests than that take the places of rows that finish.
    cache_bytes: keys and values kept for later turns; beyond it the rollouts used least recently are computed again. Rows being
                 decoded are not counted: they take max_batch times the longest rollout at most.
    progress:    called after every step with (tokens sampled, rows still going).

    A turn also ends (`Finish.LENGTH`) where the model has no position left for another token.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        decode: Decode,
        dtype: torch.dtype | None = None,
        owned: bool = False,
        max_batch: int = 128,
        cache_bytes: int = 4 * 2**30,
        progress: Progress | None = None,
    ) -> None:
        if max_batch < 1:
            raise ValueError(f"max_batch is {max_batch}, must be at least 1")
        refuse_laid_out(model)
        self._model = model
        self._decode = decode
        self._dtype = dtype
        self._in_place = owned and dtype is not None
        self._max_batch = max_batch
        self._cache_bytes = cache_bytes
        self.progress = progress
        config = pretrained(model).config.get_text_config()
        self._vocabulary = int(config.vocab_size)
        self.max_positions = int(getattr(config, "max_position_embeddings", None) or 2**62)
        """Tokens a rollout may have in all; unlimited for models without positions."""
        self.refusal = packed_refusal(model) or _head_refusal(model)
        """Why the flat decoder cannot be used for this model (None = it can); rows are then decoded one at a time."""
        self._decoder: Decoder[Any] | None = None
        self._weights: tuple[object, ...] = ()

    # Weights

    def forget(self) -> None:
        """Drop every cache, and the copy of the weights."""
        if self._in_place and self._decoder is not None:
            self._decoder.forget()
        else:
            self._decoder = None

    def _current(self) -> Decoder[Any]:
        """The decoder for the weights as they are now."""
        if self._decoder is not None and self._in_place:
            return self._decoder
        weights = fingerprint(self._model)
        if self._decoder is None or weights != self._weights:
            self._decoder = None  # frees the old copy before the new one is made
            self._decoder = self._make_decoder()
            self._weights = weights
        return self._decoder

    def _make_decoder(self) -> Decoder[Any]:
        flat = self.refusal is None
        if self._dtype is None:
            serving = Serving.live(self._model)
        else:
            serving = Serving.laid_out(self._model, self._dtype, own_head=not flat, in_place=self._in_place)
        return FlatDecoder(serving, cache_bytes=self._cache_bytes) if flat else CacheDecoder(serving)

    # Sampling

    @contextmanager
    def stream(self, params: SamplingParams, *, starts: Sequence[Sequence[int]] = ()) -> Iterator[LocalStream]:
        """Raises `RunError` on a context that does not fit the model or logits that are not finite."""
        check_params(params)
        with self._opened(common_start(starts)) as decoder:
            yield LocalStream(decoder, params, StopRule(params, self._decode), self._turn, self._max_batch, self.progress)

    def generate(self, requests: Sequence[TurnRequest], params: SamplingParams) -> list[Completion]:
        """Answer every request, in order. Raises as `stream` does."""
        with self.stream(params, starts=[request.context for request in requests]) as stream:
            stream.submit(requests)
            answers: dict[SampleKey, Completion] = {}
            while stream.busy:
                answers |= {turn.request.key: turn.completion() for turn in stream.advance()}
        return [answers[request.key] for request in requests]

    def _turn(self, request: TurnRequest) -> _Turn:
        room = self.max_positions - len(request.context)
        turn = _Turn(request, min(request.max_tokens, room), TurnNoise(request.key, request.turn))
        self._check(turn, room)
        if request.max_tokens == 0:
            turn.finish = Finish.LENGTH
        return turn

    def _check(self, turn: _Turn, room: int) -> None:
        context = turn.request.context
        if not context:
            raise RunError("the context is empty: there is nothing to predict the first token from", where=str(turn))
        if room <= 0:
            raise RunError(
                f"the context has {len(context)} tokens, the model takes {self.max_positions} and has none left to write",
                where=str(turn),
                hint="drop or shorten long prompts (data.max_length), or limit the turns and their tokens",
            )
        if turn.request.max_tokens < 0:
            raise RunError(f"max_tokens is {turn.request.max_tokens}", where=str(turn))
        if not 0 <= min(context) <= max(context) < self._vocabulary:
            raise RunError(
                f"the context holds a token id outside 0 … {self._vocabulary - 1}",
                where=str(turn),
                hint="use the tokenizer that belongs to the model",
            )

    @contextmanager
    def _opened(self, shared: Sequence[int]) -> Iterator[Decoder[Any]]:
        decoder = self._current()
        with decoder.ready(shared):
            try:
                yield decoder
            finally:
                decoder.release()


class LocalStream:
    """A stream of `LocalSampler`. Which rows are decoded together depends on when requests come; what they become does not."""

    def __init__(
        self,
        decoder: Decoder[Any],
        params: SamplingParams,
        rule: StopRule,
        turn_of: Callable[[TurnRequest], _Turn],
        max_batch: int,
        progress: Progress | None,
    ) -> None:
        self._decoder, self._params, self._rule, self._turn_of, self._max_batch = decoder, params, rule, turn_of, max_batch
        self._progress = progress
        self._waiting: deque[_Turn] = deque()
        self._waited = 0
        self._live: list[_Turn] = []
        self._empty: list[_Turn] = []
        """Turns that may have no token."""
        self._ended_tokens = 0

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._live or self._empty)

    def submit(self, requests: Sequence[TurnRequest]) -> None:
        turns = [self._turn_of(request) for request in requests]
        _check_distinct([*(turn.request for turn in (*self._waiting, *self._live, *self._empty)), *requests])
        self._waiting.extend(turn for turn in turns if turn.finish is None)
        self._empty += [turn for turn in turns if turn.finish is not None]

    def step(self) -> list[Answer]:
        return [(turn.request, turn.completion()) for turn in self.advance()]

    def advance(self) -> list[_Turn]:
        """The turns that ended with the next token of every row."""
        ended, self._empty = self._empty, []
        if self._waiting and self._worth_opening():
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._max_batch - len(self._live)))]
            rows, logits = self._decoder.open([turn.request for turn in batch])
            for turn, row in zip(batch, rows, strict=True):
                turn.row = row
            self._waited = 0
            going = self._sample(batch, logits)
            self._live += going
            ended += [turn for turn in batch if turn.finish is not None]
        elif self._live:
            self._waited += bool(self._waiting)
            batch = self._live
            logits = self._decoder.step([turn.row for turn in batch], [turn.tokens[-1] for turn in batch])
            self._live = self._sample(batch, logits)
            ended += [turn for turn in batch if turn.finish is not None]
        self._ended_tokens += sum(len(turn.tokens) for turn in ended)
        if self._progress is not None:
            self._progress(self._ended_tokens + sum(len(turn.tokens) for turn in self._live), len(self._live))
        return ended

    def _worth_opening(self) -> bool:
        """Opening costs a pass over the weights however few rows it brings: they must become a third of all, or have waited and all fit."""
        fitting = min(len(self._waiting), self._max_batch - len(self._live))
        return fitting > 0 and (2 * fitting >= len(self._live) or (fitting == len(self._waiting) and self._waited >= _PATIENCE))

    def _sample(self, turns: Sequence[_Turn], logits: Tensor) -> list[_Turn]:
        """Give every turn its next token from logits [n, V]; close those that end with it and return the others."""
        uniforms = torch.tensor([turn.noise.at(len(turn.tokens)) for turn in turns], dtype=torch.float64, device=logits.device)
        picked = pick(logits, uniforms, self._params)
        going = []
        values = zip(turns, picked.tokens.tolist(), picked.logprobs.tolist(), picked.finite.tolist(), strict=True)
        for turn, token, logprob, finite in values:
            if not finite or not math.isfinite(logprob):
                raise RunError(
                    f"the logits of token {len(turn.tokens)} are not finite",
                    where=str(turn),
                    hint="the weights hold a NaN or an infinity, or overflow in the sampler's dtype; go back to the last checkpoint",
                )
            turn.tokens.append(token)
            turn.logprobs.append(logprob)
            turn.finish = self._rule.finish(turn.tokens, turn.max_tokens)
            if turn.finish is None:
                going.append(turn)
            else:
                self._decoder.close(turn.row)
        return going


def _head_refusal(model: nn.Module) -> str | None:
    try:
        check_head(model)
    except ModelError as refused:
        return refused.what
    return None


def _check_distinct(requests: Sequence[TurnRequest]) -> None:
    repeated = [key for key, times in Counter(request.key for request in requests).items() if times > 1]
    if repeated:
        raise RunError(f"two requests of one call have the key {repeated[0]}: they would draw the same noise")
