"""A sampler that writes what the test says: canned turns, exact log-probs, and a record of everything it was asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from postgrad.protocols import BatchStream, Completion, Finish, SamplingParams, TurnRequest
from postgrad.testing.tiny import tiny_tokenizer

Canned = str | Sequence[int] | Completion
Script = Sequence[Canned] | Mapping[tuple[int, int, int], Canned] | Callable[[TurnRequest], Canned]


class ScriptedPolicy:
    """A `Sampler` that follows a script: a list of turns (the same for every rollout), a mapping (prompt, sample, turn) → turn, or a
    function of the request. A turn is text, ids, or a whole `Completion`, which is returned as it is.

    Text and ids end at the first stop id or stop string, or are cut at the request's `max_tokens`; where nothing ends them, the end
    id is added. Every token gets `logprob`. `requests` holds each call's requests, `params` what came with each, and `forgotten` how
    often `forget` was called.

    >>> from postgrad.protocols import SampleKey
    >>> policy = ScriptedPolicy(["hi"])
    >>> request = TurnRequest(SampleKey(seed=0, step=0, prompt=0, sample=0), turn=0, context=(1,), max_tokens=8)
    >>> policy.generate([request], SamplingParams(stop_ids=frozenset({2})))[0].finish
    <Finish.STOP_ID: 'stop_id'>
    """

    def __init__(self, script: Script, *, tokenizer: Any = None, logprob: float = -0.5) -> None:
        self.script = script
        self.tokenizer = tokenizer or tiny_tokenizer()
        self.logprob = logprob
        self.requests: list[list[TurnRequest]] = []
        self.params: list[SamplingParams] = []
        self.forgotten = 0

    def generate(self, requests: Sequence[TurnRequest], params: SamplingParams) -> list[Completion]:
        self.requests.append(list(requests))
        self.params.append(params)
        return [self._complete(request, params) for request in requests]

    def stream(self, params: SamplingParams, *, starts: Sequence[Sequence[int]] = ()) -> AbstractContextManager[BatchStream]:
        return nullcontext(BatchStream(partial(self.generate, params=params)))

    def forget(self) -> None:
        self.forgotten += 1

    def _complete(self, request: TurnRequest, params: SamplingParams) -> Completion:
        canned = self._canned(request)
        if isinstance(canned, Completion):
            return canned
        ids = self.tokenizer.encode(canned, add_special_tokens=False) if isinstance(canned, str) else list(canned)
        for length in range(1, min(len(ids), request.max_tokens) + 1):
            if ids[length - 1] in params.stop_ids:
                return self._completion(ids[:length], Finish.STOP_ID)
            if params.stop_strings and any(text in self.tokenizer.decode(ids[:length]) for text in params.stop_strings):
                return self._completion(ids[:length], Finish.STOP_STRING)
        if len(ids) >= request.max_tokens:
            return self._completion(ids[: request.max_tokens], Finish.LENGTH)
        if not params.stop_ids:
            raise ValueError("the scripted turn is shorter than max_tokens and no stop id could end it")
        eos = self.tokenizer.eos_token_id
        return self._completion([*ids, eos if eos in params.stop_ids else min(params.stop_ids)], Finish.STOP_ID)

    def _completion(self, ids: Sequence[int], finish: Finish) -> Completion:
        return Completion(tuple(ids), (self.logprob,) * len(ids), finish)

    def _canned(self, request: TurnRequest) -> Canned:
        if callable(self.script):
            return self.script(request)
        place = (request.key.prompt, request.key.sample, request.turn)
        try:
            return self.script[place] if isinstance(self.script, Mapping) else self.script[request.turn]
        except (KeyError, IndexError):
            raise LookupError(f"the script has no turn for (prompt, sample, turn) = {place}") from None
