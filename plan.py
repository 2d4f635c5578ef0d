"""Does it fit? The memory of a GPU in a full run, by arithmetic, before one is rented.

The idea. Sharded training keeps float32 master weights, gradients and AdamW moments in equal parts
on R GPUs; everything else is per GPU. With P parameters and A optimizers (stagewise training has
one AdamW a role, A = 2):

    master 4P/R + gradients 4P/R + moments 8PA/R

Worked number: Qwen3-8B has P = 8.19e9. On R = 8 GPUs that is 4.1 + 4.1 + 16.4 = 24.6 GB of each.

    >>> P = SHAPES["Qwen/Qwen3-8B"].parameters()
    >>> [round(part * P / 8 / 1e9, 1) for part in (4, 4, 8 * 2)]
    [4.1, 4.1, 16.4]

What computes is gathered in 16 bits, and its gradient exists in 16 and in 32 bits until it is
reduced: 2 + 2 + 4 bytes a parameter for two layers (one computes, the next one comes) and for what
lies outside of the layers, which stays gathered for the whole pass. A micro-batch of T tokens
keeps one hidden state a layer and, with recomputation, the inside of one layer at a time. Chunked
log-probs hold three chunks of float32 logits. Generating and training take turns: while the engine
holds its share of the GPU, gradients and activations don't exist.

It is arithmetic, not a measurement: allocators and kernels take some more. tests/gpu_check.py
measures on a real GPU. `python train.py --preset qwen3-8b --dry-run` prints the plan.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """The numbers of a Qwen3 model's config.json that decide its size."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    tied: bool
    head_dim: int = 128
    vocabulary: int = 151_936

    def layer(self) -> int:
        """Parameters of a decoder layer: attention with its two head norms, MLP, two norms."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        norms = 2 * self.hidden + 2 * self.head_dim
        return attention + 3 * self.hidden * self.intermediate + norms

    def outside(self) -> int:
        """Parameters outside of the layers: embedding, head where it is not tied, last norm."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden

    def parameters(self) -> int:
        """
        >>> SHAPES["Qwen/Qwen3-8B"].parameters(), SHAPES["Qwen/Qwen3-0.6B"].parameters()
        (8190735360, 596049920)
        """
        return self.layers * self.layer() + self.outside()

    def kv_bytes(self) -> int:
        """Bytes of keys and values that a token takes in the engine, in 16 bits.

        >>> SHAPES["Qwen/Qwen3-8B"].kv_bytes()     # 2 x 36 layers x 8 heads x 128 x 2 bytes
        147456
        """
        return 2 * self.layers * self.kv_heads * self.head_dim * 2


SHAPES = {
    "Qwen/Qwen3-0.6B": Shape(1024, 28, 3072, 16, 8, tied=True),
    "Qwen/Qwen3-1.7B": Shape(2048, 28, 6144, 16, 8, tied=True),
    "Qwen/Qwen3-4B": Shape(2560, 36, 9728, 32, 8, tied=True),
    "Qwen/Qwen3-8B": Shape(4096, 36, 12288, 32, 8, tied=False),
}


def memory_plan(
    shape: Shape, *, ranks: int, optimizers: int, micro_batch: int, chunk: int, recompute: bool
) -> dict[str, float]:
    """What a GPU holds while it trains -> bytes, see the header. micro_batch, chunk: tokens."""
    p = shape.parameters()
    inside = shape.head_dim * 2 * (shape.heads + shape.kv_heads) + 3 * shape.intermediate
    layers = 1 if recompute else shape.layers
    return {
        "master weights, float32": 4 * p / ranks,
        "gradients, float32": 4 * p / ranks,
        f"AdamW moments, {optimizers} x": 8 * p * optimizers / ranks,
        "gathered layers and head": 8 * (2 * shape.layer() + shape.outside()),
        "hidden states": 2 * micro_batch * shape.hidden * (shape.layers + 1),
        "inside a layer": 2 * micro_batch * (inside + 6 * shape.hidden) * layers,
        "chunks of logits": 3 * 4 * chunk * shape.vocabulary,
    }


def generation_plan(shape: Shape, *, ranks: int, optimizers: int, engine: float) -> dict:
    """What a GPU holds while it generates -> bytes. engine: bytes that the engine may take."""
    p = shape.parameters()
    return {
        "master weights, float32": 4 * p / ranks,
        f"AdamW moments, {optimizers} x": 8 * p * optimizers / ranks,
        "engine: weights, 16 bits": 2 * p,
        "engine: keys and values": max(0.0, engine - 2 * p),
    }


def main() -> None:
    """Parameters, and GB of a GPU while it trains, for every shape here on 1 and on 8 GPUs."""
    for name, shape in SHAPES.items():
        sums = [
            sum(
                memory_plan(
                    shape, ranks=n, optimizers=2, micro_batch=16384, chunk=1024, recompute=True
                ).values()
            )
            for n in (1, 8)
        ]
        print(
            f"{name}: {shape.parameters() / 1e9:.2f} B parameters,"
            f" {sums[0] / 1e9:.0f} GB on one GPU, {sums[1] / 1e9:.0f} GB on each of 8"
        )


if __name__ == "__main__":
    main()
