"""Peak memory and CPU time of chunked log-probs against the plain way, forward and backward.

    python tests/bench_logprobs.py                     # some minutes on one core, 6 GB
    python tests/bench_logprobs.py --tokens 1024 --hidden 256 --chunk 64

Each measurement is a fresh process, because the peak of a process (ru_maxrss) never goes down. A
third kind of process, `nothing`, holds the inputs and both gradients and computes nothing: its peak
is subtracted, so the figures are what the log-probs themselves cost. Time is the process's CPU
time, which other programs on the machine disturb less than the clock, the best of `--repeats`.
Exit status 1 if a target is missed: memory at most 1/8 of the plain way, time at most 1.5 times.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

MEMORY_TARGET, TIME_TARGET = 1 / 8, 1.5


def main() -> int:
    parser = argparse.ArgumentParser(description="chunked against plain log-probs")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--child", choices=["nothing", "plain", "chunked"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options)))
        return 0
    runs = {way: [spawn(way) for _ in range(options.repeats)] for way in ("plain", "chunked")}
    inputs = spawn("nothing")["peak_mb"]
    peak = {way: min(run["peak_mb"] for run in runs[way]) - inputs for way in runs}
    seconds = {way: min(run["cpu_s"] for run in runs[way]) for way in runs}
    memory_ratio, time_ratio = (
        peak["chunked"] / peak["plain"],
        seconds["chunked"] / seconds["plain"],
    )
    print(
        f"{options.tokens} tokens x {options.vocab} x {options.hidden}, {options.dtype}, ", end=""
    )
    print(f"chunk {options.chunk}; inputs and gradients {inputs:.0f} MB")
    for way in runs:
        print(f"{way:8} peak {peak[way]:7.0f} MB   CPU time {seconds[way]:6.2f} s")
    print(f"ratio    peak 1/{1 / memory_ratio:.1f}       CPU time {time_ratio:.2f}")
    return int(memory_ratio > MEMORY_TARGET or time_ratio > TIME_TARGET)


def spawn(way: str) -> dict:
    # This process never imports torch: a child starts with its parent's peak as its own.
    command = [sys.executable, __file__, *sys.argv[1:], "--child", way]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure(options: argparse.Namespace) -> dict:
    import torch

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from grpo import token_logprobs

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    hidden = torch.randn(options.tokens, options.hidden, dtype=dtype, requires_grad=True)
    weight = torch.randn(options.vocab, options.hidden) * 3 / options.hidden**0.5  # logits ~ 3
    weight = weight.to(dtype).requires_grad_()
    targets = torch.randint(options.vocab, (options.tokens,))
    start = time.process_time()
    if options.child == "nothing":
        hidden.grad, weight.grad = torch.ones_like(hidden), torch.ones_like(weight)
    elif options.child == "plain":
        logits = torch.nn.functional.linear(hidden, weight).float()
        logits.log_softmax(dim=1).gather(1, targets[:, None]).sum().backward()
    else:
        token_logprobs(hidden, weight, targets, chunk=options.chunk).sum().backward()
    cpu_s = time.process_time() - start
    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"peak_mb": peak_kb / 1024, "cpu_s": cpu_s}


if __name__ == "__main__":
    sys.exit(main())
