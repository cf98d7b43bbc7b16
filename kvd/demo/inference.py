"""What the two inference processes have in common: one thread, the model, its tokenizer."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

from kvd.demo.errors import DemoFailed
from kvd.errors import InvalidArgument

NODES = {"prefill": "prefill", "decode": "decode"}
"""Node ids of the daemons that the two processes use."""
DEVICE = "demo"
"""Name of the decode node's device, where it has one."""


def check_model(folder: Path) -> None:
    """Raise :class:`InvalidArgument` for what is no model's folder at all."""
    if not os.path.isfile(folder / "config.json"):  # false where this user may not look, too
        raise InvalidArgument(f"{folder}: has no config.json; --model wants the folder of a Hugging Face model")


def load(folder: Path) -> tuple[Any, Any]:
    """The model in fp32 and its tokenizer. Raises :class:`DemoFailed` for a folder that holds none."""
    import torch
    import transformers

    # Each inference process has one core; OpenMP threads that fight for it are many times slower than one.
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    check_model(folder)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DemoFailed(f"{folder}: can't be loaded: {reason}") from None
    return model.eval(), tokenizer


def context_of(model: Any) -> int:
    """How many tokens the model was made for."""
    return int(model.config.get_text_config(decoder=True).max_position_embeddings)


def vocabulary_of(model: Any) -> int:
    """How many different tokens the model knows."""
    return int(model.config.get_text_config(decoder=True).vocab_size)


def peak_memory() -> int:
    """The most bytes that this process ever had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def be_first_to_go() -> None:
    """Where memory runs out, the kernel shall end this process rather than the user's."""
    try:
        with open(f"/proc/{os.getpid()}/oom_score_adj", "w") as file:
            file.write("500")
    except OSError:
        return
