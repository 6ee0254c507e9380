"""How many bytes one row of an encoder output takes, before the first one has been seen.

Only a guess: the pool learns the true size from the first item of a modality that a worker brings.
One that is too small costs that first item, one that is too large some blocks.
"""

from __future__ import annotations

from typing import Any

_VISION = ("image", "video", "vision_chunk")


def row_bytes(vllm_config: Any, modality: str) -> int:
    """Bytes of a row: what vLLM has measured, else what the model's configuration lets expect."""
    measured = getattr(vllm_config.ec_transfer_config, "mm_encoder_output_widths", None) or {}
    width = measured.get(modality) or _expected_width(vllm_config.model_config, modality)
    return max(1, int(width) * _itemsize(vllm_config.model_config.dtype))


def _expected_width(model_config: Any, modality: str) -> int:
    width = _embedding_width(model_config)
    if modality not in _VISION:
        return width
    vision = _vision_config(model_config)
    layers = getattr(vision, "deepstack_visual_indexes", None) or ()
    # Such encoders put the features of several layers side by side, each as wide as the output.
    return (
        int(getattr(vision, "out_hidden_size", None) or width) * (1 + len(layers))
        if layers
        else width
    )


def _embedding_width(model_config: Any) -> int:
    for name in ("get_inputs_embeds_size", "get_hidden_size"):
        method = getattr(model_config, name, None)
        if callable(method):
            return int(method())
    return 4096


def _vision_config(model_config: Any) -> Any:
    """The vision encoder's own configuration; some models keep it one level down."""
    hf_config = getattr(model_config, "hf_config", None)
    for parent in (hf_config, getattr(hf_config, "thinker_config", None)):
        vision = getattr(parent, "vision_config", None)
        if vision is not None:
            return vision
    return None


def _itemsize(dtype: Any) -> int:
    return int(getattr(dtype, "itemsize", 2))
