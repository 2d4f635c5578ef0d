"""Chat template, stop tokens and context of the Qwen presets, on a tokenizer of Qwen3's structure.

The template here has the parts of Qwen3's that decide something: turns between <|im_start|> and
<|im_end|>, and, where thinking is off, an empty <think> block that opens the reply. As there,
<|im_end|> ends a turn, <|endoftext|> pads and ends a text, and the generation config names both.
"""

import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from engine import CHAT_KWARGS, TorchEngine, load_model
from sft import Example, encode

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ADDED = ["<think>", "</think>"]  # Qwen3 adds them as tokens that are not special
TEMPLATE = (
    "{%- for m in messages %}"
    "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)
ASK = [{"role": "system", "content": "Solve."}, {"role": "user", "content": "1+1?"}]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=plain,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=SPECIAL,
    )
    made.add_tokens(ADDED)
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    """A saved model whose head is zero: every token is equally likely."""
    path = tmp_path_factory.mktemp("qwen")
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=320,  # padded, as Qwen3's is: 151,936 rows for 151,669 tokens
            hidden_size=32,
            num_hidden_layers=1,
            intermediate_size=32,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
        )
    )
    torch.nn.init.zeros_(model.lm_head.weight)
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    model.generation_config = GenerationConfig(eos_token_id=ends, do_sample=True, top_k=20)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def replies(folder, n: int, **options) -> list:
    model, tokenizer = load_model(folder, "cpu")
    engine = TorchEngine(model, tokenizer, chat_kwargs=CHAT_KWARGS, **options)
    for i in range(n):
        engine.submit(i, ASK, max_tokens=300, temperature=1.0, seed=i)
    done = []
    while engine.pending():
        done += engine.step()
    return done


def test_thinking_is_off_in_the_engine_and_in_the_cold_start(tokenizer, folder):
    (reply, *_) = replies(folder, 1)
    prompt = tokenizer.decode(reply.prompt_ids)
    assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert prompt.count("<|im_start|>") == 3
    think = tokenizer.convert_tokens_to_ids("<think>")
    assert reply.prompt_ids.count(think) == 1  # a token of its own, not seven characters
    (example,) = encode([Example(ASK, "2")], tokenizer, max_context=99, chat_kwargs=CHAT_KWARGS)
    assert example.prompt_ids == reply.prompt_ids
    assert example.output_ids == [*tokenizer("2").input_ids, tokenizer.eos_token_id]


def test_both_end_tokens_stop_and_are_kept(tokenizer, folder):
    """trainer_bugs 33: the padding token is an end too, and is kept with its log-prob."""
    ends = set(tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))
    done = replies(folder, 24)
    last = {reply.output_ids[-1] for reply in done if reply.finish_reason == "stop"}
    assert last == ends
    for reply in done:
        assert not ends & set(reply.output_ids[:-1])
        assert len(reply.logp_sampler) == len(reply.output_ids)
        # Of all 320 rows: nothing of generation_config.json (top_k = 20) may narrow the draw.
        assert reply.logp_sampler == pytest.approx([-5.768321] * len(reply.output_ids), abs=1e-4)


def test_the_context_bounds_a_reply(folder):
    done = replies(folder, 20, max_context=90)
    longest = max(len(reply.prompt_ids) + len(reply.output_ids) for reply in done)
    assert longest <= 90
    cut = [r for r in done if r.finish_reason == "length"]
    assert cut and all(len(r.prompt_ids) + len(r.output_ids) == 90 for r in cut)


def test_the_folder_keeps_what_the_template_needs(folder):
    assert "enable_thinking" in (folder / "chat_template.jinja").read_text()
    saved = json.loads((folder / "generation_config.json").read_text())
    assert len(saved["eos_token_id"]) == 2
