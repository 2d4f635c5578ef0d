"""Memory and time plans against real models and by hand, and what the full-run presets promise."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

import engine
import train
from execute import shares, tally

# 8 tasks a step, 4 x 4, 4 updates; micro-batches of 16,384 tokens
PAPER = train.Config(recompute=True)


def model_of(shape: train.Shape, **more) -> Qwen3ForCausalLM:
    """A Qwen3 of this shape without memory."""
    config = Qwen3Config(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=shape.tied,
        **more,
    )
    with torch.device("meta"):
        return Qwen3ForCausalLM(config)


@pytest.mark.parametrize("name", train.SHAPES)
def test_parameters_are_those_of_transformers_own_model(name):
    shape = train.SHAPES[name]
    model = model_of(shape)
    assert shape.parameters() == sum(p.numel() for p in model.parameters())
    layer = model.model.layers[0]
    assert shape.layer() == sum(p.numel() for p in layer.parameters())


def test_bytes_of_a_token_are_those_of_a_real_cache():
    shape = train.Shape(64, 3, 96, 4, 2, tied=True, head_dim=32, vocabulary=50)
    cache = DynamicCache()
    for layer in range(shape.layers):
        states = torch.zeros(1, shape.kv_heads, 7, shape.head_dim, dtype=torch.bfloat16)
        cache.update(states, states, layer)
    held = sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))
    assert shape.kv_bytes() * 7 == held


def test_the_8b_plan_by_hand():
    """8.190735e9 parameters on 8 GPUs: 4P/8 = 4.095 GB of master weights, 16.381 GB of moments.

    Gathered: 8 bytes for two layers of 192,946,432 and for 1,244,663,808 outside, 13.044 GB. Hidden
    states: 2 bytes x 16,384 tokens x 4,096 x 37 = 4.966 GB.
    """
    shape = train.SHAPES["Qwen/Qwen3-8B"]
    found = train.memory_plan(shape, PAPER, ranks=8)
    want = {
        "master weights, float32": 4.095,
        "gradients, float32": 4.095,
        "AdamW moments, 2 x": 16.381,
        "gathered layers and head": 13.044,
        "hidden states": 4.966,
        "inside a layer": 2.349,
        "chunks of logits": 1.867,
    }
    for name, gigabytes in want.items():
        assert found[name] / 1e9 == pytest.approx(gigabytes, abs=5e-4), name


def test_flops_of_a_forward_are_those_of_a_real_model():
    """torch counts matrix products, and of attention the masked half as well: twice ours."""
    shape = train.Shape(64, 3, 96, 4, 2, tied=True, head_dim=32, vocabulary=500)
    model = model_of(shape, attn_implementation="eager")
    counted, attention = {}, {}
    for length in (10, 50):
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, length, dtype=torch.long, device="meta"))
        counted[length] = counter.get_total_flops() / length
        attention[length] = shape.forward_flops(length) - 2 * shape.parameters()
        rest = counted[length] - 2 * attention[length]
        assert rest == pytest.approx(2 * shape.parameters(), rel=0.03)  # norms are no product
    assert counted[50] - counted[10] == pytest.approx(2 * (attention[50] - attention[10]), rel=0.01)


H200 = {"tflops": 989, "bandwidth": 4.8}


def test_the_8b_time_by_hand():
    """One task a GPU. A token's forward: 2 x 8.1907e9 = 16.381e9 FLOPs, and attention 0.442e9 at
    1,500 tokens, 0.737e9 at 2,500. 35 % of 989 TFLOP/s: 346.15e12. 60 % of 4.8 TB/s: 2.88e12.

    prompts, 4 + 64 calls:  68 x 1,500 x 16.824e9 / 346.15e12                         =  4.957 s
    4 designs:       1,000 x (16.381e9 +  4 x 2,000 x 147,456 = 17.561e9) / 2.88e12   =  6.098 s
    16 executions: 4 x 1,000 x (16.381e9 + 16 x 2,000 x 147,456 = 21.100e9) / 2.88e12 = 29.306 s
    training 512 calls: 512 x 2,500 / 8 x 5 x 17.119e9 / 346.15e12                    = 39.563 s
    training 32 calls: a sixteenth of that                                            =  2.473 s
    """
    shape = train.SHAPES["Qwen/Qwen3-8B"]
    found = train.time_plan(shape, PAPER, **H200, ranks=8, kv_tokens=462_637)
    assert found["generate"] == pytest.approx(4.957 + 6.098 + 29.306, abs=5e-3)
    assert found["train executor"] == pytest.approx(39.563, abs=5e-3)
    assert found["train designer"] == pytest.approx(2.473, abs=5e-3)


def test_sequences_that_do_not_fit_together_run_in_waves():
    """Room for 5 sequences of 2,500 tokens: 16 executions read the weights in 4 waves, 4 designs
    in one. Three more readings of 16.381e9 bytes at 4 x 1,000 tokens: 68.256 s more."""
    shape = train.SHAPES["Qwen/Qwen3-8B"]
    plans = [
        train.time_plan(shape, PAPER, **H200, ranks=8, kv_tokens=room) for room in (12_500, 1e6)
    ]
    assert plans[0]["generate"] - plans[1]["generate"] == pytest.approx(68.256, abs=5e-3)
    assert plans[0]["train executor"] == plans[1]["train executor"]


def test_the_rank_with_most_tasks_decides_and_training_is_shared_evenly():
    shape = train.SHAPES["Qwen/Qwen3-8B"]
    one, three, eight = (
        train.time_plan(
            shape,
            dataclasses.replace(PAPER, tasks_per_step=tasks),
            **H200,
            ranks=ranks,
            kv_tokens=1e6,
        )
        for tasks, ranks in ((3, 1), (8, 3), (8, 8))
    )
    assert three["generate"] == one["generate"] > eight["generate"]
    assert three["train executor"] == pytest.approx(eight["train executor"] * 8 / 3)


def timed(capsys, *argv) -> dict[str, list[float]]:
    """GPUs -> the numbers of their row in a dry run's table of times."""
    assert train.main([*argv, "--dry-run"]) == 0
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()]
    return {
        row[0].strip(): [float(x) for x in row[1:]] for row in rows if row and row[0][2:5] == " x "
    }


def test_hours_of_a_run_are_those_of_its_stages(capsys):
    """K = 30 of 400 steps: 7 executor stages, 6 designer stages and 10 steps of a seventh."""
    ((gpus, (generate, designer, executor, hours, gpu_hours)),) = timed(
        capsys, "--preset", "qwen3-8b"
    ).items()
    assert gpus == "8 x H200" and (generate, designer, executor) == (40.4, 2.5, 39.6)
    assert hours == pytest.approx((400 * 40.36 + 210 * 39.56 + 190 * 2.47) / 3600, abs=0.06)
    assert gpu_hours == pytest.approx(8 * hours, abs=0.5)
    (joint,) = timed(capsys, "--preset", "qwen3-8b", "--train", "joint").values()
    assert joint[3] == pytest.approx(400 * (40.36 + 39.56 + 2.47) / 3600, abs=0.06)
    (single,) = timed(capsys, "--preset", "qwen3-8b", "--train", "single").values()
    assert single[1] == 0 and single[2] == pytest.approx(39.56 / 4, abs=0.06)  # one call each
    flags = ["--no-recompute", "--updates-per-step", "1", "--token-budget", "2048"]
    (three,) = timed(capsys, "--preset", "qwen3-8b", *flags).values()
    assert three[2] == pytest.approx(39.56 * 3 / 5, abs=0.06)  # a forward, and a backward of two


def test_a_dry_run_times_the_gpus_of_the_presets_memory_only(capsys):
    both = timed(capsys, "--preset", "qwen3-1.7b")
    assert list(both) == ["1 x H100 80 GB", "1 x A100 80 GB"]
    assert list(timed(capsys, "--preset", "qwen3-0.6b")) == ["1 x RTX 4090"]
    for argv in (["--train", "sft", "--data", __file__], ["--device", "cpu"]):
        assert timed(capsys, "--preset", "qwen3-8b", *argv) == {}, argv
    assert timed(capsys, "--preset", "qwen3-8b", "--token-budget", "400000") == {}  # doesn't fit


def test_a_dry_run_without_designs_or_without_draws_plans_none(capsys):
    """8 tasks x 16 executions, one call of 8,192 tokens each: 1,048,576. Imitating needs no engine:
    one that would not fit beside the weights is no reason against it."""
    assert train.main(["--preset", "qwen3-8b", "--train", "single", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert " 0 designs, 128 executions" in out and "0 of designers, 1,048,576 of executors" in out
    argv = ["--preset", "qwen3-8b", "--dry-run", "--vllm-memory", "1"]
    assert train.main(argv) == 0 and "IT DOES NOT FIT" in capsys.readouterr().out
    assert train.main([*argv, "--train", "sft", "--data", __file__]) == 0
    out = capsys.readouterr().out
    assert "it fits" in out and "the engine" not in out


def test_what_the_time_plan_assumes_is_in_the_log():
    metrics = shares(tally([]))
    for name in ("calls_per_execution", "prompt_length/executor", "length/designer"):
        assert name in metrics


def test_the_presets_have_the_papers_numbers():
    for name in ("qwen3-4b", "qwen3-8b"):
        config = train.parse(["--preset", name])
        assert (config.n_designs, config.n_executions, config.tasks_per_step) == (4, 4, 8)
        assert (config.stage_length, config.first_role, config.lr) == (30, "executor", 5e-6)
        assert config.designer_max_tokens == config.executor_max_tokens == 8192
        assert config.max_context == 16_384 and config.temperature == 1.0
        assert (config.clip_low, config.clip_high, config.grad_clip) == (0.2, 0.2, 1.0)
        assert config.weight_decay == 0.01 and config.isolation == "strict"
        mix = train.parse_mix(config.data)
        assert mix == {"polaris": 4, "apps": 2, "codecontests": 2}


@pytest.mark.parametrize("name", [name for name in train.PRESETS if name != "toy"])
def test_a_dry_run_says_that_it_fits(name, capsys):
    """Also that neither role's longest reply exceeds the context by itself."""
    assert train.main(["--preset", name, "--dry-run"]) == 0
    out = capsys.readouterr().out
    ranks, gigabytes = train.CARDS[name]
    assert f"{ranks} ranks" in out and f"of {gigabytes} |" in out and "it fits" in out
    assert "8 tasks (4 polaris, 2 apps, 2 codecontests), 32 designs, 128 executions" in out
    config = train.parse(["--preset", name])
    assert max(config.designer_max_tokens, config.executor_max_tokens) < config.max_context
    everything = 4 + 2 * 8  # bytes a parameter: the weights, and two roles' moments
    size = everything * train.shape_of(config).parameters() / 1e9
    assert f"a checkpoint: {size:.0f} GB" in out


def test_a_dry_run_says_what_does_not_fit(capsys):
    argv = ["--preset", "qwen3-8b", "--dry-run", "--token-budget", "400000"]
    assert train.main(argv) == 0
    assert "IT DOES NOT FIT" in capsys.readouterr().out
    assert train.main(["--dry-run"]) == 2
    assert "--dry-run plans for a given model" in capsys.readouterr().err


def test_a_dry_run_reads_the_shape_of_a_folder(tmp_path, capsys):
    model, tokenizer = engine.random_tiny()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    argv = ["--preset", "qwen3-0.6b", "--model", str(tmp_path), "--dry-run"]
    config = train.parse(argv)
    assert train.shape_of(config).parameters() == sum(p.numel() for p in model.parameters())
    assert dataclasses.astuple(train.shape_of(config))[:5] == (64, 2, 128, 4, 2)
    assert train.main(argv) == 0 and "0.00 B parameters" in capsys.readouterr().out


@pytest.mark.parametrize("config", ['{"model_type": "none"}', '{"model_type": "gpt2"}', "{"])
def test_a_dry_run_of_a_folder_without_a_shape_is_one_line(config, tmp_path, capsys):
    (tmp_path / "config.json").write_text(config)
    argv = ["--preset", "qwen3-8b", "--model", str(tmp_path), "--dry-run"]
    assert train.main(argv) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "has no shape to plan for" in line
