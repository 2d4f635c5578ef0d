"""What chunked log-probs cost against the plain way: peak memory, the head alone, a whole update.

    python tests/bench_logprobs.py                     # about 15 minutes on one core, 9 GB
    python tests/bench_logprobs.py --tokens 2048 --chunk 256 --layers 0    # smaller, no update

Plain is what a trainer writes first: log_softmax over all logits in float32, autograd. Three
ratios, chunked / plain, each with its target; the exit status is 1 if one is missed.

1. Peak memory of the head's forward and backward, at most 1/8, at 8,192 tokens and the default
   chunk. Both peaks are proportional to the vocabulary: plain holds three [tokens, V] tensors (the
   log-probs, their gradient, that of the logits), chunked two [chunk, V]. At Qwen3's V of 151,936
   and 4 bytes that is 14.9 GB against 1.24 GB, 1/12; so as to fit a small machine it runs at half
   that V. Each measurement is a fresh process, because the peak of a process (ru_maxrss) never goes
   down. A process that holds the inputs and both gradients and computes nothing is subtracted.
2. Time of the same, at most 1.5 times: four matrix products instead of three, so 4/3 and a second
   softmax.
3. Time of a whole update of Qwen3-0.6B's shape (28 layers, V = 151,936, random weights), at most
   1.1 times: forward, loss, backward with recomputed activations, norm and clip. By arithmetic: a
   token costs 8 x 440 M operations in the layers and 6 or 8 x 156 M in the head, so 1.07 where
   every token is scored; a prompt's tokens are not. AdamW's step, equal on both sides, is left out:
   it would not fit and would only bring the ratio nearer to 1. One row, 1,024 tokens scored, in two
   chunks.

Measured on a busy machine, in one run: 605 against 6,804 MB, 1/11.2; 102 against 74 s, 1.37; 114
against 112 s, 1.02. Two earlier runs, of one repeat each, gave 1.12 and 1.26 for the head, 1.04 and
0.92 for the update: ratios of times vary by a tenth here.

Time is the process's CPU time on one thread, which other programs disturb less than the clock; the
best of `--repeats`, in turn.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

MEMORY_TARGET, HEAD_TARGET, UPDATE_TARGET = 1 / 8, 1.5, 1.1


def main() -> int:
    parser = argparse.ArgumentParser(description="chunked against plain log-probs")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=151_936 // 2, help="of the head alone")
    parser.add_argument("--hidden", type=int, default=1024, help="of the head alone")
    parser.add_argument("--chunk", type=int, default=0, help="0: grpo.LOGPROB_CHUNK")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--layers", type=int, default=28, help="of the update; 0 leaves it out")
    parser.add_argument("--update-tokens", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=2)
    children = ["nothing", "plain", "chunked", "update"]
    parser.add_argument("--child", choices=children, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        measure = update_times if options.child == "update" else head_cost
        print(json.dumps(measure(options)))
        return 0
    missed = compare_heads(options)
    if options.layers:
        missed |= compare_updates(options)
    return int(missed)


def compare_heads(options: argparse.Namespace) -> bool:
    """Prints the first two ratios; true if one misses its target."""
    runs = {"plain": [], "chunked": []}
    for _ in range(options.repeats):
        for way in runs:
            runs[way].append(spawn(way))
    nothing = spawn("nothing")
    peak = {way: min(run["peak_mb"] for run in runs[way]) - nothing["peak_mb"] for way in runs}
    seconds = {way: min(run["cpu_s"] for run in runs[way]) for way in runs}
    memory, head = peak["chunked"] / peak["plain"], seconds["chunked"] / seconds["plain"]
    print(f"head: {options.tokens} tokens x {options.vocab} x {options.hidden}, {options.dtype}")
    print(f"  chunk {nothing['chunk']}; not counted: {nothing['peak_mb']:.0f} MB")
    for way in runs:
        print(f"  {way:8} peak {peak[way]:7.0f} MB   CPU time {seconds[way]:7.2f} s")
    print(f"1 peak memory   1/{1 / memory:.1f}   target 1/{1 / MEMORY_TARGET:.0f}")
    print(f"2 head's time   {head:.2f}    target {HEAD_TARGET}", flush=True)
    return memory > MEMORY_TARGET or head > HEAD_TARGET


def compare_updates(options: argparse.Namespace) -> bool:
    """Prints the third ratio; true if it misses its target."""
    run = spawn("update")
    plain, chunked = run["plain"], run["chunked"]
    print(f"update: {options.layers} layers, {options.update_tokens} tokens, chunk {run['chunk']}")
    print(f"  plain {plain:.1f} s, chunked {chunked:.1f} s of CPU time")
    print(f"3 update's time {chunked / plain:.2f}    target {UPDATE_TARGET}")
    return chunked / plain > UPDATE_TARGET


def spawn(child: str) -> dict:
    # This process never imports torch: a child starts with its parent's peak as its own.
    command = [sys.executable, __file__, *sys.argv[1:], "--child", child]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def plain_logprobs(hidden, head_weight, targets, *, temperature=1.0, chunk=None):
    """The plain way, with the arguments of token_logprobs; the chunk is not used."""
    logits = (hidden @ head_weight.T).float() / temperature
    return logits.log_softmax(dim=1).gather(1, targets[:, None])[:, 0]


def head_cost(options: argparse.Namespace) -> dict:
    """Peak memory and CPU time of one forward and backward; both gradients stay."""
    import torch

    from grpo import LOGPROB_CHUNK, token_logprobs

    torch.set_num_threads(1)
    torch.manual_seed(0)
    chunk = options.chunk or LOGPROB_CHUNK
    dtype = getattr(torch, options.dtype)
    hidden = torch.randn(options.tokens, options.hidden, dtype=dtype, requires_grad=True)
    weight = torch.randn(options.vocab, options.hidden).mul_(3 / options.hidden**0.5)  # logits ~ 3
    weight = weight.to(dtype).requires_grad_()
    targets = torch.randint(options.vocab, (options.tokens,))
    start = time.process_time()
    if options.child == "nothing":
        hidden.grad, weight.grad = torch.ones_like(hidden), torch.ones_like(weight)
    else:
        way = plain_logprobs if options.child == "plain" else token_logprobs
        way(hidden, weight, targets, chunk=chunk).sum().backward()
    cpu_s = time.process_time() - start
    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"peak_mb": peak_kb / 1024, "cpu_s": cpu_s, "chunk": chunk}


def update_times(options: argparse.Namespace) -> dict:
    """CPU seconds of an update, each way, the best of the repeats."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    import grpo

    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = dict(vocab_size=151_936, hidden_size=1024, intermediate_size=3072, head_dim=128)
    shape |= dict(num_attention_heads=16, num_key_value_heads=8, tie_word_embeddings=True)
    model = Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=options.layers, **shape))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    scored = options.update_tokens
    chunk = min(options.chunk or grpo.LOGPROB_CHUNK, scored // 2)
    policy = grpo.ScoringModel(model, chunk=chunk).train()
    ids = torch.randint(151_936, (1, 1 + scored))
    mask = torch.ones_like(ids).bool()
    mask[0, 0] = False
    ways = {"plain": plain_logprobs, "chunked": grpo.token_logprobs}
    seconds = {way: [] for way in ways}
    for _ in range(options.repeats):
        for way, function in ways.items():
            model.zero_grad(set_to_none=True)
            grpo.token_logprobs = function
            start = time.process_time()
            logp = policy(ids, torch.ones_like(ids), None, mask)
            loss, _ = grpo.policy_loss(logp, logp.detach(), torch.ones(1), mask, scored)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            seconds[way].append(time.process_time() - start)
    return {way: min(times) for way, times in seconds.items()} | {"chunk": chunk}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    sys.exit(main())
