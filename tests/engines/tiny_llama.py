"""A random Llama of 2.6 million parameters and its tokenizer, made in a second. Its tokens are ``t0`` to ``t511``.

Runs in the environment that has vLLM (and with it transformers): ``python -m tests.engines.tiny_llama FOLDER``.
"""

from __future__ import annotations

import sys

VOCABULARY = 512
CONTEXT = 4096


def make(folder: str, seed: int = 7) -> None:
    """Write the model; the same for the same seed, and far from any tie between two tokens."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0", eos_token="t1", bos_token="t2").save_pretrained(
        folder
    )
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, head_dim=32, max_position_embeddings=CONTEXT, eos_token_id=1, bos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)  # else attention is so flat that a wrong cache changes no token
    model.save_pretrained(folder)


if __name__ == "__main__":
    make(sys.argv[1])
