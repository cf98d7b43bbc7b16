"""Tiny random models of the families that the reference engine serves, the same in every process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)  # several threads on few cores cost these small models ten times as long

VOCABULARY = 500
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.3,
}


def llama(**changes: Any) -> Any:
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaConfig(**COMMON, **sizes | changes)


def qwen3() -> Any:
    return transformers.Qwen3Config(
        **COMMON, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=1, head_dim=32
    )


def qwen3_windows() -> Any:
    return transformers.Qwen3Config(
        **COMMON,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=2,
    )


def gemma3() -> Any:
    return transformers.Gemma3TextConfig(
        **COMMON,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=8,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        query_pre_attn_scalar=16,
        tie_word_embeddings=False,
    )


CONFIGS = {
    "llama-gqa": llama,
    "llama-mha": lambda: llama(num_key_value_heads=4),
    "qwen3": qwen3,
    "qwen3-windows": qwen3_windows,
    "gemma3": gemma3,
}


def random_model(name: str, attention: str = "sdpa", dtype: Any = torch.float32) -> Any:
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation=attention)
    return model.to(dtype).eval()


def with_norms_of_its_own(model: Any) -> Any:
    """The model with a norm before each layer's attention that no other layer has; made at random, all are alike."""
    for at, layer in enumerate(model.model.layers):
        with torch.no_grad():
            layer.input_layernorm.weight.uniform_(-0.5, 1.5, generator=torch.Generator().manual_seed(at))
    return model


def normed(model: Any, layer: int, x: Any) -> Any:
    """What that norm makes of the residual stream (..., hidden size), in float64."""
    norm = model.model.layers[layer].input_layernorm
    scale = norm.weight.detach().double().numpy() + (1 if "Gemma" in type(norm).__name__ else 0)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + model.config.rms_norm_eps) * scale


def random_prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def model_folder(folder: Any) -> Any:
    """Write a tiny Llama with a token for each byte to a folder, as Hugging Face writes models; returns the folder."""
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(folder)
    torch.manual_seed(11)
    transformers.LlamaForCausalLM(llama()).save_pretrained(folder)
    return folder
