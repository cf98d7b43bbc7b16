"""The shapes of models' KV caches, by name, from a checkpoint's ``config.json``, or spelled out."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from kvd.errors import InvalidArgument

_MAX_CONFIG = 1 << 20
_LARGEST = 1 << 16


@dataclasses.dataclass(frozen=True, slots=True)
class ModelShape:
    """A KV cache of ``layers`` layers; ``parts`` is 2 for K and V, 1 for a latent that serves as both (MLA)."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    parts: int = 2

    def __post_init__(self) -> None:
        for field in ("layers", "kv_heads", "head_dim"):
            value = getattr(self, field)
            if not 1 <= value <= _LARGEST:
                raise InvalidArgument(
                    f"{field} of model {self.name!r} is {value}; it must be between 1 and {_LARGEST}", field=field
                )

    def held(self, tokens: int, heads: tuple[int, int] | None = None) -> dict[str, tuple[int, int]]:
        """Ranges of the axes that a rank with these heads holds of a request; all heads by default."""
        return {
            "l": (0, self.layers),
            "kv": (0, self.parts),
            "h": heads or (0, self.kv_heads),
            "t": (0, tokens),
            "d": (0, self.head_dim),
        }


MODELS = {
    shape.name: shape
    for shape in (
        ModelShape("llama-3.1-8b", 32, 8, 128),
        ModelShape("llama-3.1-70b", 80, 8, 128),
        ModelShape("llama-3.1-405b", 126, 8, 128),
        ModelShape("mistral-7b", 32, 8, 128),
        ModelShape("qwen2.5-7b", 28, 4, 128),
        ModelShape("qwen3-32b", 64, 8, 128),
        ModelShape("smollm2-135m", 30, 3, 64),
        ModelShape("deepseek-v3", 61, 1, 576, 1),
    )
}


def model(text: str) -> ModelShape:
    """A name of :data:`MODELS`, the path of a ``config.json`` (or its folder), or ``layers=80,kv_heads=8,head_dim=128``
    (and ``parts=1`` for MLA). Raises :class:`InvalidArgument`."""
    if text.lower() in MODELS:
        return MODELS[text.lower()]
    if "=" in text:
        return _spelled_out(text)
    path = Path(text)
    try:
        path = path / "config.json" if path.is_dir() else path
        if path.suffix == ".json" or path.exists():
            return _from_config(path)
    except OSError as error:
        raise InvalidArgument(f"{str(path)[-255:]} can't be read: {error.strerror}", file=str(path)[-255:]) from None
    raise InvalidArgument(
        f"there is no model {text[:64]!r}; name a config.json, one of {', '.join(MODELS)}, or give "
        "layers=N,kv_heads=N,head_dim=N",
        model=text[:64],
    )


def _spelled_out(text: str) -> ModelShape:
    values: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        if name not in ("layers", "kv_heads", "head_dim", "parts") or not (number.isascii() and number.isdigit()):
            raise InvalidArgument(
                f"{part[:32]!r} says nothing of a model; give layers=N,kv_heads=N,head_dim=N", model=text[:64]
            )
        if name in values:
            raise InvalidArgument(f"the model has {name} twice; give each once", field=name, model=text[:64])
        values[name] = int(number[:9])
    if missing := {"layers", "kv_heads", "head_dim"} - set(values):
        raise InvalidArgument(f"the model lacks {min(missing)}; give layers=N,kv_heads=N,head_dim=N", model=text[:64])
    if values.get("parts", 2) not in (1, 2):
        raise InvalidArgument("parts is 2 for K and V, or 1 for a latent", field="parts")
    return ModelShape(text, **values)


def _from_config(path: Path) -> ModelShape:
    with path.open("rb") as file:
        text = file.read(_MAX_CONFIG + 1)
    try:
        if len(text) > _MAX_CONFIG:
            raise ValueError(f"it has more than {_MAX_CONFIG} bytes")
        config = json.loads(text)
    except ValueError as error:
        raise InvalidArgument(f"{path} is no model's configuration: {error}", file=str(path)) from None
    except RecursionError:
        raise InvalidArgument(f"{path} is no model's configuration: it is nested too deeply", file=str(path)) from None
    if isinstance(config, dict) and isinstance(config.get("text_config"), dict):
        config = config["text_config"]
    if not isinstance(config, dict):
        raise InvalidArgument(f"{path} is no model's configuration: it has no fields", file=str(path))

    def number(*names: str, default: int | None = None) -> int:
        found: Any = next((config[name] for name in names if config.get(name) is not None), default)
        if not isinstance(found, int) or isinstance(found, bool):
            raise InvalidArgument(f"{path} has no number {names[0]}", file=str(path), field=names[0])
        return found

    layers, heads = number("num_hidden_layers", "n_layer"), number("num_attention_heads", "n_head")
    if config.get("kv_lora_rank") is not None:
        return ModelShape(str(path), layers, 1, number("kv_lora_rank") + number("qk_rope_head_dim"), 1)
    hidden = number("hidden_size", "n_embd", default=0)
    dim = number("head_dim", default=hidden // heads if heads else 0)
    return ModelShape(str(path), layers, number("num_key_value_heads", default=heads), dim)
