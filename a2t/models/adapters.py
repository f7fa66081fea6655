"""The side channel's weights: two added tokens and a LoRA adapter in PEFT's own form.

An adapter is a folder that `PeftModel.from_pretrained` reads: low-rank updates of the attention and feed-forward
projections, and the two new rows of the embedding and of the output matrix (DESIGN.md section 5).  Everything else of
the base stays as it was, so one base serves several adapters.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol, overload

import torch
from peft import (
    LoraConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    load_peft_weights,
    set_peft_model_state_dict,
)
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import Qwen3ForCausalLM

from a2t.duplex.protocol import TOKEN_TEXT
from a2t.models.hub import read_json

# peft asks transformers for this by its old name
warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)

SIDE_CHANNEL = (TOKEN_TEXT["asr_start"], TOKEN_TEXT["asr_end"])
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ROW_MODULES = ("embed_tokens", "lm_head")


class GrowingTokenizer(Protocol):
    def token_id(self, token: str) -> int | None: ...

    def add_tokens(self, tokens: Sequence[str]) -> list[int]:
        """Gives each new token the next free id."""


def add_side_channel_tokens(lm: Qwen3ForCausalLM, tokenizer: GrowingTokenizer) -> tuple[int, int]:
    """Ids of `<|asr_start|>` and `<|asr_end|>` in both the tokenizer and the model's two matrices.

    A tokenizer that knows them is left alone.  Otherwise they take the next ids: rows that the checkpoint has but its
    tokenizer does not use are reused, and only where there are none do the matrices grow.  New rows start as copies of
    `</unit>`'s.
    """
    known = [tokenizer.token_id(t) for t in SIDE_CHANNEL]
    new = [t for t, i in zip(SIDE_CHANNEL, known, strict=True) if i is None]
    added = tokenizer.add_tokens(new) if new else []
    start, end = (tokenizer.token_id(t) for t in SIDE_CHANNEL)
    assert start is not None and end is not None
    rows = lm.get_input_embeddings().weight.shape[0]
    if max(start, end) >= rows:
        lm.resize_token_embeddings(max(start, end) + 1, mean_resizing=False)
    if added:
        unit_end = tokenizer.token_id(TOKEN_TEXT["unit_end"])
        assert unit_end is not None, "a duplex tokenizer has </unit>"
        start_rows(lm, added, unit_end)
    return start, end


@torch.no_grad()
def start_rows(lm: Qwen3ForCausalLM, ids: Sequence[int], like: int) -> None:
    """Copies row `like` of the embedding and of the output matrix to `ids`: where training starts from."""
    for module in (lm.get_input_embeddings(), lm.get_output_embeddings()):
        if module.weight.device.type != "meta":
            module.weight[list(ids)] = module.weight[like].clone()


def lora_config(token_ids: Sequence[int], rank: int = 16, alpha: int = 32, dropout: float = 0.0) -> LoraConfig:
    """What is trained: LoRA on every projection, and the rows `token_ids` of both matrices."""
    return LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=list(PROJECTIONS),
        trainable_token_indices={name: list(token_ids) for name in ROW_MODULES},
        task_type="CAUSAL_LM",
    )


def new_adapter(
    lm: Qwen3ForCausalLM, token_ids: Sequence[int], rank: int = 16, alpha: int = 32, dropout: float = 0.0
) -> PeftModel:
    """Wraps `lm` with a fresh adapter that changes nothing yet; only its parameters require gradients."""
    if lm.config.tie_word_embeddings:
        raise ValueError("the output matrix is tied to the embedding: a duplex checkpoint has two separate matrices")
    return get_peft_model(lm, lora_config(token_ids, rank, alpha, dropout))


def lora_parameters(model: torch.nn.Module) -> int:
    """How many LoRA parameters (the token rows not counted)."""
    return sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)


def save_adapter(model: PeftModel, folder: str | Path, name: str = "default", base: str = "") -> None:
    """Writes adapter `name` to `folder` in PEFT's form (safetensors).  `base` is what its card calls the base model:
    never a path of this machine."""
    if name not in model.peft_config:
        raise ValueError(f"no adapter {name!r} is loaded; there are: {', '.join(sorted(model.peft_config))}")
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    state = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    assert all(tensor.numel() for tensor in state.values()), "a sharded model's adapter is gathered before it is saved"
    save_file({key: tensor.contiguous() for key, tensor in state.items()}, out / "adapter_model.safetensors")
    config = copy.deepcopy(model.peft_config[name])
    config.base_model_name_or_path, config.inference_mode = base or None, True
    config.save_pretrained(str(out))


@overload
def load_adapter(lm: Qwen3ForCausalLM, folder: str | Path, merge: Literal[True] = True) -> Qwen3ForCausalLM: ...
@overload
def load_adapter(lm: Qwen3ForCausalLM, folder: str | Path, merge: Literal[False]) -> PeftModel: ...


def load_adapter(lm: Qwen3ForCausalLM, folder: str | Path, merge: bool = True) -> Qwen3ForCausalLM | PeftModel:
    """The model with the adapter in `folder`: merged into its weights (nothing of PEFT is left and nothing is paid at
    inference), or beside them (`merge=False`: see `use_adapter`, `merge_adapter`).

    Raises ValueError where the folder holds no adapter or one for another model; it names the tensor.
    """
    _check_fits(lm, Path(folder))
    if merge and (Path(folder) / "scope.json").is_file():
        raise ValueError(
            f"{folder} acts on some positions only and cannot be merged: load it with a2t.models.scope.adapted"
        )
    model = PeftModel.from_pretrained(lm, str(folder)).eval()
    return model.merge_and_unload() if merge else model


def continue_adapter(model: PeftModel, folder: str | Path, name: str = "default") -> None:
    """Puts a saved adapter's values into adapter `name`, which stays trainable. ValueError where they do not fit."""
    state = load_peft_weights(str(folder), device="cpu")
    fresh = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    if wrong := sorted(set(state) ^ set(fresh)) or [k for k, v in state.items() if v.shape != fresh[k].shape]:
        raise ValueError(f"{folder} is no adapter of this form: {wrong[0]} is missing, unknown or of another shape")
    set_peft_model_state_dict(model, state, adapter_name=name)


def load_adapters(lm: Qwen3ForCausalLM, folders: Mapping[str, str | Path]) -> PeftModel:
    """Several adapters, by name, on one base; the first is active."""
    if not folders:
        raise ValueError("no adapter was given")
    for folder in folders.values():
        _check_fits(lm, Path(folder))
    (first, folder), *rest = folders.items()
    model = PeftModel.from_pretrained(lm, str(folder), adapter_name=first)
    for name, folder in rest:
        model.load_adapter(str(folder), adapter_name=name)
    return model.eval()


def use_adapter(model: PeftModel, name: str) -> None:
    """Makes adapter `name` the active one; a merged one is taken out first."""
    if name not in model.peft_config:
        raise ValueError(f"no adapter {name!r} is loaded; there are: {', '.join(sorted(model.peft_config))}")
    if any(getattr(module, "merged", False) for module in model.modules()):
        model.unmerge_adapter()
    model.set_adapter(name)
    model.requires_grad_(False)


def merge_adapter(model: PeftModel) -> None:
    """Adds the active adapter to the base's weights, for speed; `unmerge_adapter` takes it out again, exact to the
    rounding of the weights' dtype."""
    model.merge_adapter()


def unmerge_adapter(model: PeftModel) -> None:
    model.unmerge_adapter()


def _check_fits(lm: Qwen3ForCausalLM, folder: Path) -> None:
    """PEFT's own message on a wrong adapter is a page of tensor names: say the first that does not fit."""
    path = folder / "adapter_model.safetensors"
    if not (folder / "adapter_config.json").is_file() or not path.is_file():
        raise ValueError(f"{folder} holds no adapter: adapter_config.json and adapter_model.safetensors are needed")
    config = read_json(folder / "adapter_config.json")
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{folder}/adapter_config.json: peft_type is {config.get('peft_type')!r}; only 'LORA' is read")
    modules = dict((lm.get_base_model() if isinstance(lm, PeftModel) else lm).named_modules())
    try:
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118
                name = key.removeprefix("base_model.model.")
                owner = name.split(".lora_")[0].split(".token_adapter")[0]
                owner = owner if owner in modules else owner.rpartition(".")[0]
                if owner not in modules:
                    raise ValueError(
                        f"{path}: {key} belongs to no module of this model: the adapter is another model's"
                    )
                module = modules[owner]
                rows, columns = module.weight.shape
                want = columns if "lora_A" in key else rows if "lora_B" in key else columns
                shape = file.get_slice(key).get_shape()
                found = shape[0] if "lora_B" in key else shape[-1]
                if found != want:
                    raise ValueError(
                        f"{path}: {key} is {shape}, which does not fit {owner} [{rows}, {columns}]: "
                        "the adapter is another model's"
                    )
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read ({error}): copy it again") from error
