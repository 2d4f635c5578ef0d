"""Tokens per CPU second: TorchEngine against model.generate, side by side in one run.

    OMP_NUM_THREADS=1 python tests/bench_engine.py          (about a minute)

A Qwen3 of 0.5 M random parameters, 256 calls, greedy, and both must give the same tokens. The runs
alternate and the best of each counts, because CPU time too suffers from busy neighbours.

- even: 256 prompts of one length, 64 new tokens each. What is left is the decode loop itself.
- ragged: prompts of 15-60 tokens, 5-16 new tokens, all different: the shape of the toy's calls.
- shared: the same, four calls a prompt, as executions of one design have.

generate pads all prompts to the longest and decodes every row to the largest limit; only the tokens
that were asked for are counted, for both. Tokenisation is in the engine's time, not in generate's.
"""

import random
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from engine import TorchEngine, random_tiny  # noqa: E402

CALLS, ROUNDS = 256, 4


def make_calls(prompt_chars, new_tokens, sharing):
    """-> [(text, limit)]; the chat template adds 15 tokens to the characters of a text."""
    rng = random.Random(0)
    texts = [
        "".join(rng.choices("0123456789+-*=", k=rng.randint(*prompt_chars)))
        for _ in range(CALLS // sharing)
    ]
    return [(texts[i // sharing], rng.randint(*new_tokens)) for i in range(CALLS)]


def with_engine(engine, calls):
    for key, (text, limit) in enumerate(calls):
        messages = [{"role": "user", "content": text}]
        engine.submit(key, messages, max_tokens=limit, temperature=0.0, seed=key)
    outputs = {}
    while engine.pending():
        outputs |= {c.key: c.output_ids for c in engine.step()}
    return [outputs[key] for key in range(len(calls))]


def with_generate(model, prompts, calls):
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    longest = max(limit for _, limit in calls)
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=longest, do_sample=False, pad_token_id=0
    )
    return [row[width : width + limit].tolist() for row, (_, limit) in zip(out, calls, strict=True)]


def main():
    model, tokenizer = random_tiny(
        vocab_size=400,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        eos_token_id=None,
    )
    tokenizer.eos_token = None  # every call runs to its limit, in both
    model.generation_config.eos_token_id = None
    print(
        "tokens per CPU second   engine  generate   ratio   (best of", ROUNDS, "alternating runs)"
    )
    for name, *shape in [
        ("even", (30, 30), (64, 64), 1),
        ("ragged", (1, 45), (5, 16), 1),
        ("shared", (1, 45), (5, 16), 4),
    ]:
        calls = make_calls(*shape)
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            )
            for text, _ in calls
        ]
        tokens = sum(limit for _, limit in calls)
        times = {"engine": [], "generate": []}
        for _ in range(ROUNDS):
            engine = TorchEngine(model, tokenizer, max_batch=CALLS)
            start = time.process_time()
            ours = with_engine(engine, calls)
            middle = time.process_time()
            theirs = with_generate(model, prompts, calls)
            times["engine"].append(middle - start)
            times["generate"].append(time.process_time() - middle)
        same = sum(a == b for a, b in zip(ours, theirs, strict=True))
        fast, slow = (tokens / min(times[side]) for side in ("engine", "generate"))
        print(
            f"{name:22} {fast:8.0f} {slow:9.0f} {fast / slow:7.2f}   {same}/{CALLS} replies equal"
        )


if __name__ == "__main__":
    main()
