"""What Tenstorrent's own library makes of bytes: a script for a Python that has ttnn, which the suite need not have.

    python3.12 ttnn_judge.py ASKED.npz ANSWERS.npz

For each ``shape_N``, ``dtype_N`` (bf16, f32, bfp8_b, bfp4_b) and ``layout_N`` (tile, row_major; ``tile_N``: rows and
columns of other tiles than 32 x 32; ``transposed_N``: columns first) it makes a host tensor, overwrites its bytes with
``raw_N`` and answers what the library reads, ``values_N``, f32; with ``given_N``, f32 values, it answers the library's
own bytes of them, ``encoded_N``. Only the extension module is loaded, not the package,
which would want a device and much else.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np

DTYPES = {"bf16": "BFLOAT16", "f32": "FLOAT32", "bfp8_b": "BFLOAT8_B", "bfp4_b": "BFLOAT4_B"}


def load() -> Any:
    """``ttnn._ttnn`` without ``ttnn/__init__``."""
    found = importlib.util.find_spec("ttnn")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("ttnn is not installed in this Python")
    package = Path(found.submodule_search_locations[0])
    mock = Path(__file__).parents[1] / "data" / "tenstorrent" / "mock_p150.yaml"
    os.environ.setdefault("TT_METAL_MOCK_CLUSTER_DESC_PATH", str(mock))
    os.environ.setdefault("TT_METAL_RUNTIME_ROOT", str(package))
    os.environ.setdefault("TT_LOGGER_LEVEL", "off")
    shell = types.ModuleType("ttnn")
    shell.__path__ = [str(package)]
    sys.modules["ttnn"] = shell
    return importlib.import_module("ttnn._ttnn")


def host_bytes(ttnn: Any, tensor: Any) -> Any:
    """The tensor's bytes, writable."""
    first = ttnn.multi_device.MeshCoordinate(0, 0)
    return np.from_dlpack(tensor.host_buffer().get_shard(first)).view(np.uint8).reshape(-1)


def values_of(ttnn: Any, tensor: Any, shape: tuple[int, ...]) -> Any:
    try:
        return np.asarray(tensor.to_numpy(), np.float32).reshape(shape)
    except TypeError:  # NumPy has no bfloat16
        return np.array(tensor.to_list(), np.float32).reshape(shape)


def answer(ttnn: Any, asked: Any) -> dict[str, Any]:
    answers = {}
    for name in asked.files:
        if not name.startswith("shape_"):
            continue
        number = name.removeprefix("shape_")
        shape = tuple(asked[name].tolist())
        dtype = getattr(ttnn.tensor.DataType, DTYPES[str(asked[f"dtype_{number}"])])
        layout = getattr(ttnn.tensor.Layout, str(asked[f"layout_{number}"]).upper())

        tile = None
        if f"tile_{number}" in asked.files:
            tile = ttnn.tensor.Tile(asked[f"tile_{number}"].tolist(), bool(asked.get(f"transposed_{number}", False)))

        def made(values: Any, dtype: Any = dtype, layout: Any = layout, tile: Any = tile) -> Any:
            values = np.ascontiguousarray(values, np.float32)
            return ttnn.tensor.Tensor(values, data_type=dtype, layout=layout, tile=tile)

        if f"given_{number}" in asked.files:
            answers[f"encoded_{number}"] = host_bytes(ttnn, made(asked[f"given_{number}"].reshape(shape))).copy()
        if f"raw_{number}" in asked.files:
            tensor = made(np.ones(shape, np.float32))
            raw, memory = asked[f"raw_{number}"], host_bytes(ttnn, tensor)
            if len(raw) != len(memory):
                raise SystemExit(f"tensor {number} has {len(memory)} bytes in ttnn, and {len(raw)} were given")
            memory[:] = raw
            answers[f"values_{number}"] = values_of(ttnn, tensor, shape)
    return answers


if __name__ == "__main__":
    given = np.load(sys.argv[1])
    np.savez(sys.argv[2], **answer(load(), given))
