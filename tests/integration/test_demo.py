"""``kvd demo`` as its user runs it: real daemons and processes, with a tiny random model in place of SmolLM2."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from tests.engine_models import COMMON, torch  # noqa: E402

LAYERS, KV_HEADS, DIM, CONTEXT = 4, 2, 16, 512
ENTRY_BYTES = 2 * DIM * 4
WAIT_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model with a token for each byte, written as Hugging Face writes it."""
    folder = tmp_path_factory.mktemp("model") / "tiny-llama"
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(folder)
    torch.manual_seed(11)
    config = transformers.LlamaConfig(
        **COMMON | {"vocab_size": len(alphabet), "max_position_embeddings": CONTEXT},
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=KV_HEADS,
        head_dim=DIM,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


class Demo:
    """One ``kvd demo``, marked so that nothing that it leaves behind goes unseen."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.mark = f"KVD_TEST_MARK={uuid.uuid4()}"
        name, _, value = self.mark.partition("=")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvd", "demo", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, name: value, "TMPDIR": str(self.temporary)},
            start_new_session=True,
        )
        self._seen = {1: b"", 2: b""}

    def until(self, told: Callable[[], bool]) -> None:
        """Read what it writes until ``told()``, or until it has closed both streams."""
        pipes = {self.process.stdout: 1, self.process.stderr: 2}
        while pipes and not told():
            ready, _, _ = select.select(list(pipes), [], [], WAIT_S)
            assert ready, f"nothing came for {WAIT_S} s after {self._seen}"
            for pipe in ready:
                assert pipe is not None
                data = os.read(pipe.fileno(), 1 << 16)
                self._seen[pipes[pipe]] += data
                if not data:
                    del pipes[pipe]

    def end(self) -> int:
        """Its exit code, after which nothing of it must be there any more."""
        self.until(lambda: False)
        code = self.process.wait(WAIT_S)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        assert self.others() == {}
        assert list(self.temporary.iterdir()) == []
        return code

    def others(self) -> dict[int, str]:
        """Processes that carry the mark, by number, with their command lines."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    marked = self.mark.encode() in (entry / "environ").read_bytes()
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                except (OSError, UnicodeDecodeError):
                    continue
                if marked and command and int(entry.name) != self.process.pid:
                    found[int(entry.name)] = command
        return found

    @property
    def out(self) -> str:
        return self._seen[1].decode()

    @property
    def err(self) -> str:
        return self._seen[2].decode()


def only_text(text: str) -> bool:
    return all(c.isprintable() or c in "\n\t" for c in text)


def test_json_is_all_of_standard_output(tmp_path: Path, model: Path) -> None:
    demo = Demo(tmp_path, "--model", str(model), "--prompt-tokens", "120", "--tokens", "9", "--json")
    assert demo.end() == 0, demo.err
    assert demo.out.count("\n") == 1
    report = json.loads(demo.out)
    assert report["tokens_equal"] is True
    assert report["tokens"] == report["reference_tokens"]
    assert len(report["tokens"]) == report["new_tokens"] == 9
    assert report["model"] == "tiny-llama"
    assert report["prompt_tokens"] == 120
    assert report["kv_bytes"] == 120 * LAYERS * KV_HEADS * ENTRY_BYTES
    assert report["bytes_moved"] == report["kv_bytes"] + 120 * LAYERS  # a mask byte for each token and layer
    assert report["link_configured_bit_per_s"] == 200_000_000
    assert report["ttst_s"] - report["ttft_s"] == report["stall_s"] > 0
    assert set(report["peak_memory_bytes"]) == {
        "demo",
        "prefill",
        "decode",
        "prefill-daemon",
        "decode-daemon",
    }
    assert only_text(demo.err)
    assert "prefill, layers: 4 of 4" in demo.err


def test_a_prompt_of_ones_own_on_an_unlimited_link(tmp_path: Path, model: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Wer reitet so spät durch Nacht und Wind? " * 4)
    demo = Demo(tmp_path, "--model", str(model), "--prompt-file", str(prompt), "--tokens", "3", "--link", "unlimited")
    assert demo.end() == 0, demo.err
    assert only_text(demo.out + demo.err)
    table = dict(line.split("  ", 1) for line in demo.out.splitlines()[-11:])
    assert table["same tokens as one process"].strip() == "yes"
    assert table["link"].strip().startswith("unlimited, achieved ")
    assert table["prompt"].strip().startswith(f"{len(prompt.read_text().strip().encode())} tokens")
    assert table.keys() >= {"bytes moved", "TTFT", "TTST", "TBT (mean)"}


def test_a_cache_in_tiles_gives_the_same_tokens(tmp_path: Path, model: Path) -> None:
    demo = Demo(
        tmp_path, "--model", str(model), "--prompt-tokens", "120", "--tokens", "9", "--layout", "tenstorrent", "--json"
    )
    assert demo.end() == 0, demo.err
    report = json.loads(demo.out)
    assert report["tokens_equal"] is True
    assert (report["layout"], report["channels"]) == ("tenstorrent", 8)
    padded = 128 * 32 * 4 * KV_HEADS * 2 * LAYERS  # whole tiles: 128 tokens of 32 elements
    assert report["bytes_moved"] == padded + 120 * LAYERS
    # a layer's K and V are 16 tiles, two in each of the 8 channels; layers that are ready together go together
    assert report["requests"] in range(8, 8 * LAYERS + 1, 8)
    assert report["regroup_s"] > 0


# With a link so slow, or so many tokens, that no stage is over before the signal arrives.
STAGES = {
    "while processes start": ("100kbit", lambda demo: "starting two daemons" in demo.err),
    "in prefill": ("100kbit", lambda demo: "prefill, layers" in demo.err),
    "in decode": ("5mbit", lambda demo: demo.out != ""),
}


@pytest.mark.parametrize("stage", STAGES)
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path, model: Path, stage: str) -> None:
    link, reached = STAGES[stage]
    demo = Demo(tmp_path, "--model", str(model), "--prompt-tokens", "120", "--tokens", "300", "--link", link)
    demo.until(lambda: reached(demo))
    demo.process.send_signal(signal.SIGINT)
    assert demo.end() == 130, demo.err
    assert "Traceback" not in demo.err
    assert demo.err.endswith("kvd: the demo was interrupted; nothing of it is left behind\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_end_it_as_well(tmp_path: Path, model: Path, number: signal.Signals) -> None:
    demo = Demo(tmp_path, "--model", str(model), "--prompt-tokens", "120", "--tokens", "300")
    demo.until(lambda: "starting two daemons" in demo.err)
    demo.process.send_signal(number)
    demo.process.send_signal(signal.SIGINT)  # who is in a hurry may say so again
    assert demo.end() in (128 + number, 130), demo.err
    assert "Traceback" not in demo.err


@pytest.mark.parametrize("victim", ["serve --config", "prefill_process", "decode_process"])
def test_a_killed_process_ends_it_with_one_sentence(tmp_path: Path, model: Path, victim: str) -> None:
    demo = Demo(tmp_path, "--model", str(model), "--prompt-tokens", "120", "--link", "100kbit")
    demo.until(lambda: "a prompt of" in demo.err)
    os.kill(next(pid for pid, command in demo.others().items() if victim in command), signal.SIGKILL)
    assert demo.end() == 1
    last = demo.err.splitlines()[-1]
    assert last.startswith("kvd: the ")
    assert "was killed by SIGKILL" in last or "failed:" in last
    assert "Traceback" not in demo.err


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--model", "/nowhere"], 2, "kvd: /nowhere: has no config.json; "),
        (["--prompt-file", "/nowhere.txt"], 2, "kvd: /nowhere.txt: can't be read: no such file or directory\n"),
        (
            ["--prompt-tokens", "600"],
            1,
            "kvd: the prefill process failed: a prompt of 600 tokens and 32 new ones ",
        ),
    ],
)
def test_what_cannot_be_done_is_said(
    tmp_path: Path, model: Path, arguments: list[str], code: int, sentence: str
) -> None:
    demo = Demo(tmp_path, "--model", str(model), *arguments)
    assert demo.end() == code
    assert demo.out == ""
    assert demo.err.splitlines(keepends=True)[-1].startswith(sentence)


@pytest.mark.model
def test_smollm2_with_a_thousand_tokens(tmp_path: Path) -> None:
    """The real model; fetched and converted into the user's cache if it is not there yet."""
    demo = Demo(tmp_path, "--json")
    assert demo.end() == 0, demo.err
    report = json.loads(demo.out)
    assert report["prompt_tokens"] == 1000
    assert report["tokens_equal"] is True
    assert len(report["tokens"]) == 32
    assert report["kv_bytes"] == 1000 * 2 * 23_040  # fp32
    assert "Python" in report["text"]
    assert sum(report["peak_memory_bytes"].values()) < 4e9
