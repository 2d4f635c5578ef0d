"""Text generation behind one small seam: `submit` a call, `step` until its reply comes out.

    engine.submit(key, messages, max_tokens=64, temperature=1.0, seed=7)
    while engine.pending():
        for completion in engine.step():   # whatever has ended, in any order
            ...                            # what is submitted here joins the running batch

`TorchEngine` decodes with a Hugging Face causal LM, on CPU or CUDA. `ScriptedEngine` has the same
two calls and answers from a Python function: teachers and tests.

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

import functools
import json
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache

PREFILL_TOKENS = 2048  # of a batch of prompts: what it computes should stay in a CPU's cache
PADDING_TOKENS = 64  # a forward pass costs about as much, whatever is in it


class PromptTooLong(ValueError):
    """The prompt leaves no room for even one new token within the engine's context."""


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
    and steps in the same order give the same bits. Raises ValueError for a model that doesn't
    attend to its whole context in every layer.
    """

    def __init__(self, model, tokenizer, *, max_context=None, max_batch=256, chat_kwargs=None):
        self.model, self.tokenizer = model, tokenizer
        self.device = next(model.parameters()).device
        self.max_batch = max_batch
        self.max_context = max_context or model.config.get_text_config().max_position_embeddings
        self._require_full_attention()
        self._chat_kwargs = chat_kwargs or {}
        self._encode = functools.lru_cache(maxsize=4096)(self._encode_json)
        self._stop_ids = self._find_stop_ids()
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
            raise ValueError(
                f"TorchEngine needs full attention in every layer, this model has {sorted(kinds)} "
                f"(sliding_window={window}): take another model, or a max_context within the window"
            )

    def _find_stop_ids(self) -> np.ndarray:
        generation = getattr(self.model, "generation_config", None)
        eos = generation.eos_token_id if generation is not None else None
        stop_ids = {self.tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])}
        return np.array(sorted(stop_ids - {None}), np.int64)

    def _encode_json(self, messages: str) -> tuple[int, ...]:
        ids = self.tokenizer.apply_chat_template(
            json.loads(messages), add_generation_prompt=True, return_dict=False, **self._chat_kwargs
        )
        return tuple(ids)

    def submit(self, key, messages: list[dict], *, max_tokens: int, temperature: float, seed: int):
        """Queues a call of chat messages; a later `step` returns its Completion under this key.

        max_tokens is cut to what the context has left. seed: any int, its low 64 bits count.
        Raises PromptTooLong if not even one new token fits.
        """
        if self._half_loaded:
            raise RuntimeError("the last load_weights failed half-way: load all weights again")
        if max_tokens < 1 or temperature < 0:
            raise ValueError(f"need {max_tokens=} of at least 1 and {temperature=} of at least 0")
        prompt_ids = self._encode(json.dumps(messages))
        room = self.max_context - len(prompt_ids)
        if room < 1:
            raise PromptTooLong(
                f"a prompt of {len(prompt_ids)} tokens leaves no room in a context of "
                f"{self.max_context}: shorten it, or raise max_context"
            )
        limit = min(max_tokens, room)
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
        names, touched = set(), set()
        for name, tensor in weights:
            target = targets.get(name)
            if target is None or name in names:
                raise ValueError(f"weight {name} is {'repeated' if name in names else 'unknown'}")
            if target.shape != tensor.shape:
                raise ValueError(
                    f"weight {name} has shape {tuple(tensor.shape)}, not {tuple(target.shape)}"
                )
            tensor = tensor.to(target)
            if id(target) in touched and not torch.equal(target, tensor):
                raise ValueError(f"weight {name} is tied to another one, but differs from it")
            target.copy_(tensor)
            names.add(name)
            touched.add(id(target))
        missing = [name for name, target in targets.items() if id(target) not in touched]
        if missing:
            raise ValueError(f"{len(missing)} weights did not come, such as {missing[0]}")
        self._half_loaded = False


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
