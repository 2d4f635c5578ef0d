"""What one GPU does with this code, as a table, in under 10 minutes.

    python tests/gpu_check.py                         # a CUDA GPU with 40 GB or more
    python tests/gpu_check.py --layers 8              # a smaller one
    python tests/gpu_check.py --device cpu --tiny     # the same code at toy size, in seconds

Four checks, on Qwen3-1.7B's shape with random weights in bfloat16: forward and backward of a row of
8,192 tokens with recomputed activations; chunked log-probs against plain ones; FSDP2 in a world of
one process against no FSDP, in gradients and time; and the decode rate of TorchEngine. Exit status
0, 1 if two ways that must agree do not, 2 without a GPU.

MFU, the share of the GPU's peak that the model's own arithmetic takes. For a row of T tokens, with
P weights in the layers' matrices and S tokens that the head scores:

    FLOP = 6 P T + 6 S hidden V + 6 layers T^2 heads head_dim       backward costs twice the forward

The last term is attention: two products of 2 T^2 heads head_dim each, half of it masked. What is
computed twice to save memory (activations, the chunks' logits) does not count, nor do norms and
softmax. Worked number: 28 layers of 50.3 M, T = 8,192, all scored, are 69.3 + 15.3 + 23.1 TFLOP; a
GPU with a peak of 989 TFLOP/s that takes 0.25 s for it has an MFU of 44 %:

    >>> round(training_flop(FULL, 8192, 8192) / 1e12, 1)
    107.7
    >>> mfu(107.7e12, 0.25, "NVIDIA H200"), mfu(107.7e12, 0.25, "Another GPU")
    ('44 % of 989 TFLOP/s', 'unknown: no peak for Another GPU')

It runs with torch 2.11 and transformers 5.17 too. So far it has only run on CPUs, at toy size.
"""

import argparse
import dataclasses
import gc
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench_logprobs import plain_logprobs  # noqa: E402

from engine import TorchEngine, random_tiny  # noqa: E402
from grpo import Batch, ScoringModel, policy_loss, token_logprobs  # noqa: E402

# Dense bfloat16 TFLOP/s of the makers' data sheets, by a part of torch's device name. The first
# that fits counts.
PEAKS = {
    **{"H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "A100": 312},
    **{"L40S": 362, "L4": 121, "A10G": 70, "RTX 4090": 165, "RTX 3090": 71},
}


@dataclass(frozen=True)
class Size:
    """The model, and how much of each check."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_heads: int
    head_dim: int
    vocab: int
    tokens: int  # in the one row of a training batch
    chunk: int
    sequences: tuple[int, ...]  # decoded at once
    new_tokens: int  # a sequence
    repeats: int


FULL = Size(28, 2048, 6144, 16, 8, 128, 151_936, 8192, 1024, (64, 256), 128, 3)
TINY = Size(2, 64, 128, 4, 2, 32, 500, 64, 16, (2, 4), 8, 1)


def training_flop(size: Size, tokens: int, scored: int) -> int:
    """Forward and backward of one row; the formula is above."""
    attention = size.hidden * size.head_dim * (2 * size.heads + 2 * size.key_heads)
    layer = attention + 3 * size.hidden * size.intermediate
    quadratic = size.layers * tokens**2 * size.heads * size.head_dim
    return 6 * (size.layers * layer * tokens + scored * size.hidden * size.vocab + quadratic)


def mfu(flop: float, seconds: float, device_name: str) -> str:
    peak = next((peak for part, peak in PEAKS.items() if part in device_name), None)
    if peak is None:
        return f"unknown: no peak for {device_name}"
    return f"{flop / seconds / peak / 1e10:.0f} % of {peak} TFLOP/s"


# --- what every check uses ---


@dataclass(frozen=True)
class Bench:
    """Where it runs, and the table so far."""

    device: torch.device
    name: str  # of the device
    size: Size
    failed: list[str]

    def row(self, what: str, value: str) -> None:
        print(f"| {what:34} | {value:52} |", flush=True)

    def must(self, what: str, agrees: bool, value: str) -> None:
        """A row that decides the exit status."""
        if not agrees:
            self.failed.append(what)
        self.row(what, f"{value} ({'ok' if agrees else 'TOO MUCH'})")

    def cost(self, work: Callable[[], object]) -> tuple[float, float]:
        """Seconds of `work`, the best after a warm-up, and GB at its peak (nan on a CPU)."""
        cuda = self.device.type == "cuda"
        work()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        best = math.inf
        for _ in range(self.size.repeats):
            if cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            work()
            if cuda:
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - start)
        return best, torch.cuda.max_memory_allocated() / 1e9 if cuda else math.nan

    def free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def gb(amount: float) -> str:
    return "- GB" if math.isnan(amount) else f"{amount:.2f} GB"


def make_model(bench: Bench, dtype: torch.dtype) -> Qwen3ForCausalLM:
    """The same random weights each time, rounded to `dtype`; buffers stay float32."""
    size = bench.size
    shape = dict(vocab_size=size.vocab, hidden_size=size.hidden, head_dim=size.head_dim)
    shape |= dict(num_hidden_layers=size.layers, num_attention_heads=size.heads)
    shape |= dict(num_key_value_heads=size.key_heads, intermediate_size=size.intermediate)
    shape |= dict(max_position_embeddings=max(size.tokens, 512), tie_word_embeddings=True)
    torch.manual_seed(0)
    with bench.device:
        model = Qwen3ForCausalLM(Qwen3Config(pad_token_id=None, eos_token_id=None, **shape))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def make_policy(bench: Bench, dtype: torch.dtype) -> ScoringModel:
    """As train.py trains it: activations are recomputed, log-probs chunked."""
    model = make_model(bench, dtype)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return ScoringModel(model, chunk=bench.size.chunk).train()


def one_row(bench: Bench) -> Batch:
    """A row of random tokens; the first eighth is the prompt."""
    size = bench.size
    torch.manual_seed(1)
    ids = torch.randint(size.vocab, (1, size.tokens), device=bench.device)
    mask = (torch.arange(size.tokens, device=bench.device) >= size.tokens // 8)[None]
    return Batch(ids, torch.ones_like(ids), mask, mask, None)


def backward(policy: ScoringModel, batch: Batch) -> None:
    """The gradients of one micro-batch, from none."""
    policy.zero_grad(set_to_none=True)
    logp = policy(batch.input_ids, batch.attention_mask, None, batch.response_mask)
    ones = torch.ones(len(logp), device=logp.device)
    loss, _ = policy_loss(logp, logp.detach(), ones, batch.loss_mask, int(batch.loss_mask.sum()))
    loss.backward()


def distance(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """|ours - theirs| / |theirs|, over all tensors together."""
    apart = whole = 0.0
    for a, b in zip(ours, theirs, strict=True):
        b = b.to(a.device).float()
        apart += (a.float() - b).square().sum().item()
        whole += b.square().sum().item()
    return math.sqrt(apart / whole)


# --- the checks ---


def check_training(bench: Bench) -> None:
    policy, batch = make_policy(bench, torch.bfloat16), one_row(bench)
    weights = sum(p.numel() for p in policy.parameters())
    tokens, scored = bench.size.tokens, int(batch.response_mask.sum())
    seconds, peak = bench.cost(lambda: backward(policy, batch))
    flop = training_flop(bench.size, tokens, scored)
    bench.row("model", f"{weights / 1e9:.2f} B weights, {bench.size.layers} layers, bfloat16")
    bench.row("forward and backward", f"{tokens} tokens in {seconds:.3f} s")
    bench.row("  tokens/s", f"{tokens / seconds:.0f}")
    bench.row("  TFLOP, TFLOP/s", f"{flop / 1e12:.4g}, {flop / seconds / 1e12:.4g}")
    bench.row("  MFU", mfu(flop, seconds, bench.name))
    bench.row("  peak memory, weights included", gb(peak))


def check_logprobs(bench: Bench) -> None:
    size = bench.size
    torch.manual_seed(2)
    weight = torch.randn(size.vocab, size.hidden, device=bench.device)
    weight = weight.mul_(3 / size.hidden**0.5).bfloat16().requires_grad_()  # logits are about 3
    hidden = torch.randn(size.tokens, size.hidden, device=bench.device)
    hidden = hidden.bfloat16().requires_grad_()
    targets = torch.randint(size.vocab, (size.tokens,), device=bench.device)

    def run(way, *inputs):
        logp = way(*inputs, targets, chunk=size.chunk)
        return [logp.detach(), *torch.autograd.grad(logp.sum(), inputs)]

    held = torch.cuda.memory_allocated() / 1e9 if bench.device.type == "cuda" else math.nan
    costs, results = {}, {}
    for name, way in [("plain", plain_logprobs), ("chunked", token_logprobs)]:
        try:
            costs[name] = bench.cost(lambda way=way: run(way, hidden, weight))
        except torch.OutOfMemoryError:
            bench.row(f"{name} log-probs", "out of memory: take a larger GPU to compare")
            return
        results[name] = run(way, hidden, weight)
        bench.free()
        seconds, peak = costs[name]
        costs[name] = (seconds, peak - held)
        bench.row(f"{name} log-probs", f"{seconds:.3f} s, {gb(peak - held)} above the inputs")
    time_ratio, memory_ratio = (
        chunked / plain for plain, chunked in zip(costs["plain"], costs["chunked"], strict=True)
    )
    bench.row("  chunked / plain", f"time {time_ratio:.2f}, memory {memory_ratio:.3f}")
    exact_inputs = [x.detach().float().requires_grad_() for x in (hidden, weight)]
    exact = run(token_logprobs, *exact_inputs)
    for i, part in enumerate(["log-probs", "gradient of hidden", "gradient of weight"]):
        ours, plain = (
            distance(results[name][i : i + 1], exact[i : i + 1]) for name in ("chunked", "plain")
        )
        value = f"{ours:.1e}, plain {plain:.1e}"
        bench.must(f"  {part}, error", ours < 2 * plain + 1e-5, value)


def plain_gradients(bench: Bench, batch: Batch) -> tuple[float, float, list, float]:
    """Without FSDP: seconds, GB, the gradients, and how far apart those of a second run are."""
    policy = make_policy(bench, torch.bfloat16)
    seconds, peak = bench.cost(lambda: backward(policy, batch))
    gradients = [p.grad.cpu() for p in policy.parameters()]  # the other side's memory is measured
    backward(policy, batch)
    return seconds, peak, gradients, distance([p.grad for p in policy.parameters()], gradients)


def check_fsdp(bench: Bench) -> None:
    """float32 weights, sharded and computed with in bfloat16, against bfloat16 weights."""
    batch = one_row(bench)
    plain_s, plain_peak, expected, noise = plain_gradients(bench, batch)
    bench.free()
    policy = make_policy(bench, torch.float32)
    backend = "nccl" if bench.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    options = {
        "mesh": init_device_mesh(bench.device.type, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "reshard_after_forward": True,
    }
    for layer in policy.model.model.layers:
        fully_shard(layer, **options)
    fully_shard(policy, **options)
    seconds, peak = bench.cost(lambda: backward(policy, batch))
    gradients = [p.grad.full_tensor() for p in policy.parameters()]
    dist.destroy_process_group()
    bench.row("without FSDP, bfloat16 weights", f"{plain_s:.3f} s, {gb(plain_peak)}")
    bench.row("FSDP2, world 1, float32 weights", f"{seconds:.3f} s, {gb(peak)}")
    bench.row("  time, FSDP2 / without", f"{seconds / plain_s:.2f}")
    apart = distance(gradients, expected)
    value = f"{apart:.1e}, a second run without {noise:.1e}"
    bench.must("  gradients apart", apart < max(3 * noise, 0.01), value)


def check_decoding(bench: Bench) -> None:
    model = make_model(bench, torch.bfloat16).eval()
    _, tokenizer = random_tiny()
    tokenizer.eos_token = None  # every call runs to its limit
    model.generation_config.eos_token_id = None
    new = bench.size.new_tokens
    for sequences in bench.size.sequences:
        engine = TorchEngine(model, tokenizer, max_context=512, max_batch=sequences)

        def decode(engine=engine, sequences=sequences):
            for i in range(sequences):
                messages = [{"role": "user", "content": f"question {i:4} " * 7}]
                engine.submit(i, messages, max_tokens=new, temperature=1.0, seed=i)
            while engine.pending():
                engine.step()

        seconds, peak = bench.cost(decode)
        rate = f"{sequences * new / seconds:.0f} tokens/s, {gb(peak)}"
        bench.row(f"TorchEngine, {sequences} sequences", rate)
        del engine, decode
        bench.free()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="what one GPU does with this code")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="toy size: shows that the code works")
    parser.add_argument("--layers", type=int, default=0, help="fewer, for a small GPU")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu_check.py: no CUDA GPU here; --device cpu --tiny runs the same code at toy size")
        return 2
    if options.device == "cpu" and not options.tiny:
        parser.error("a CPU needs hours for the full size: give --tiny as well")
    size = TINY if options.tiny else FULL
    if options.layers:
        size = dataclasses.replace(size, layers=options.layers)
    cuda = options.device == "cuda"
    name = torch.cuda.get_device_name() if cuda else "CPU"
    bench = Bench(torch.device(options.device), name, size, [])
    start = time.perf_counter()
    bench.row("on", f"{name}, torch {torch.__version__}")
    bench.row("-" * 34, "-" * 52)
    for check in (check_training, check_logprobs, check_fsdp, check_decoding):
        check(bench)
        bench.free()
    bench.row("all checks", f"{time.perf_counter() - start:.0f} s")
    if bench.failed:
        print(f"gpu_check.py: does not agree: {', '.join(w.strip() for w in bench.failed)}")
    return int(bool(bench.failed))


if __name__ == "__main__":
    sys.exit(main())
