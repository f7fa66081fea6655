"""One way to a model: the embedded default, a folder, or a hub id, whatever kind of model it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch

from a2t.models.base import DuplexModel
from a2t.models.hub import locate, locate_adapter, read_json
from a2t.models.scope import Scope, adapted
from a2t.models.tiny import EMBEDDED, MODEL_TYPE, load_tiny

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
EMBEDDED_NAME = "embedded"
OWN, OWN_FOLDER = "own", "adapter"


def load_model(
    model: str | Path | None = None,
    adapter: str | Path | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    side_channel: bool | None = None,
) -> DuplexModel:
    """`model`: None or "embedded" for the embedded default; a folder of its form, a MiniCPM-o checkpoint's folder, or a
    hub id.  `adapter`: a PEFT folder (or hub id), merged where it acts everywhere; "own" for the model's folder
    `adapter`, where it has one.

    `dtype` None: float32 for the embedded form, a checkpoint's own otherwise.  `device` None: a GPU where there is one
    and the model can use it ("auto": all of them).  `side_channel`: see `load_minicpmo`; the embedded form has it.
    ValueError, one line that names what is wrong, where something cannot be loaded.
    """
    name = str(EMBEDDED if model in (None, EMBEDDED_NAME) else model)
    folder = locate(name, parts=())
    embedded = model_type(folder) == MODEL_TYPE
    if adapter == OWN:
        adapter = folder / OWN_FOLDER if (folder / OWN_FOLDER).is_dir() else None
    adapter = None if adapter is None else locate_adapter(adapter)
    if adapter is not None and Scope.read(adapter) != Scope():
        base = load_model(model, None, dtype, device, side_channel=True)
        return cast(DuplexModel, adapted(base, base.lm, adapter))
    if embedded:
        if device not in (None, "cpu", torch.device("cpu")):
            raise ValueError(f"the embedded model runs on the CPU, not on {device}: leave the device out")
        return cast(DuplexModel, load_tiny(locate(name), adapter, dtype or torch.float32))
    from a2t.models.minicpmo import load_minicpmo

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    where: dict[str, Any] = {"device_map": "auto"} if device == "auto" else {"device": device}
    return cast(DuplexModel, load_minicpmo(name, adapter, dtype, side_channel=side_channel, **where))


def model_type(folder: Path) -> str:
    """What its config.json says.  ValueError where that is nothing."""
    found = read_json(folder / "config.json").get("model_type")
    if not isinstance(found, str):
        raise ValueError(f"{folder}/config.json has no model_type: it is {json.dumps(found)}")
    return found
