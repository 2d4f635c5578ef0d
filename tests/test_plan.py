"""The memory plan against real models, and what the full-run presets promise."""

import dataclasses

import pytest
import torch
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

import engine
import train


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
    found = train.memory_plan(
        shape, ranks=8, optimizers=2, micro_batch=16_384, chunk=1024, recompute=True
    )
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
