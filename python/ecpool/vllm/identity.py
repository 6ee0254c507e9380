"""Names: of an engine, of its region, and of the namespace of what its encoder computes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ecpool.vllm.config import PRIVATE_PREFIX

_NAME_LENGTH = 80  # of a private region's name, which becomes part of a file's name
_MODEL_LENGTH, _VERSION_LENGTH = 40, 20  # characters of these in a namespace's title


@dataclass(frozen=True, slots=True)
class Identity:
    """Who an engine is, equal in all its processes.

    group: what its processes share, as tools show it. region: the name of its region. namespace:
    text that is equal where encoder outputs of equal keys may stand for each other. kind: what two
    engines have in common that could share a namespace, whatever their salts.
    """

    group: str
    region: str
    namespace: str
    kind: str

    @property
    def title(self) -> str:
        """The namespace for people: model, dtype, version, and the kind in brackets."""
        return self.namespace.split("\n", 1)[0]


def identify(vllm_config: Any, *, salt: str = "", pool: str | None = None) -> Identity:
    """The identity of the engine that this configuration belongs to. pool: a shared region."""
    engine = _engine(vllm_config)
    parts = _parts(vllm_config)
    kind = _digest(json.dumps(parts, sort_keys=True), 4)
    return Identity(
        group=f"{group_prefix(kind)}{engine}",
        region=_file_name(f"{PRIVATE_PREFIX}{engine}") if pool is None else pool,
        namespace=_namespace(parts, kind, salt),
        kind=kind,
    )


def group_prefix(kind: str) -> str:
    """How the groups of all engines of this kind begin, and of no others."""
    return f"[{kind}] "


def _engine(vllm_config: Any) -> str:
    """The instance and its data-parallel index.

    Dense models reset `data_parallel_rank` to 0 in every engine, so it tells nothing apart. vLLM's
    instance id has twenty bits, too few for a machine where many engines start; the connector's
    engine id has 122.
    """
    parallel = vllm_config.parallel_config
    index = getattr(parallel, "data_parallel_index", None)
    if index is None:
        index = getattr(parallel, "data_parallel_rank", 0)
    engine_id = getattr(vllm_config.ec_transfer_config, "engine_id", None) or ""
    return f"{vllm_config.instance_id}-{engine_id}-dp{index}"


def _file_name(text: str) -> str:
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", text)
    if plain == text and len(plain) <= _NAME_LENGTH:
        return plain
    return f"{plain[: _NAME_LENGTH - 25]}-{_digest(text, 12)}"


def _digest(text: str, size: int) -> str:
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()


def namespace_of(vllm_config: Any, *, salt: str = "") -> str:
    """Text in which everything is named that changes what an encoder computes for one key.

    Its first line is for people; tools show at most 96 bytes of it.
    """
    return identify(vllm_config, salt=salt).namespace


def _parts(vllm_config: Any) -> dict[str, Any]:
    model = vllm_config.model_config
    return {
        "model": str(model.model),
        "revision": _text(getattr(model, "revision", None)),
        "dtype": dtype_name(model.dtype),
        "quantization": _text(getattr(model, "quantization", None)),
        "overrides": _text(getattr(model, "hf_overrides", None) or None),
        "adapters": _adapters(getattr(vllm_config, "lora_config", None)),
        **_code_and_config(model),
        **_preprocessing(getattr(model, "multimodal_config", None)),
        "attention": _encoder_attention(getattr(model, "multimodal_config", None)),
        "vllm": _vllm_version(),
        **_random_weights(vllm_config),
    }


def _namespace(parts: dict[str, Any], kind: str, salt: str) -> str:
    name = parts["model"].encode("ascii", "replace").decode()
    if len(name) > _MODEL_LENGTH:  # of a path its end says most
        name = "..." + name[3 - _MODEL_LENGTH :]
    version = parts["vllm"][:_VERSION_LENGTH]
    # The salt itself is nobody's business.
    mark = f"{kind}+{_digest(kind + salt, 2)}" if salt else kind
    title = f"{name} {parts['dtype']} vllm {version} [{mark}]"
    return f"{title}\n{json.dumps({**parts, 'salt': salt}, sort_keys=True)}"


def dtype_name(dtype: Any) -> str:
    """Torch's name of an element type without ``torch.``; names are taken as they are."""
    return str(dtype).removeprefix("torch.")


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if callable(value):  # its repr would hold an address
        return f"{value.__module__}.{value.__qualname__}"
    return json.dumps(value, sort_keys=True, default=str)


def _adapters(lora_config: Any) -> str | None:
    """Adapters that change encoder outputs without a trace in the key."""
    if lora_config is None:
        return None
    tower = bool(getattr(lora_config, "enable_tower_connector_lora", False))
    return _text({"tower": tower, "default": getattr(lora_config, "default_mm_loras", None)})


def _code_and_config(model: Any) -> dict[str, str | None]:
    """Where the model's code and its configuration come from, if not with its weights."""
    path = getattr(model, "hf_config_path", None)
    return {
        "code_revision": _text(getattr(model, "code_revision", None)),
        "config_path": None if path == model.model else _text(path),
    }


def _preprocessing(multimodal: Any) -> dict[str, str | None]:
    """What the engine's settings do to items on their way to the encoder.

    vLLM's keys tell of the arguments that came with a request, not of these.
    """
    rate = getattr(multimodal, "video_pruning_rate", None)
    method = getattr(multimodal, "video_pruning_method", None)
    return {
        "processor": _text(_processor_arguments(getattr(multimodal, "mm_processor_kwargs", None))),
        "media": _text(_media_arguments(getattr(multimodal, "media_io_kwargs", None))),
        "video_pruning": _text([rate, method]) if rate else None,
    }


def _encoder_attention(multimodal: Any) -> str | None:
    """The encoder's attention in a smaller type changes more than the last digits."""
    dtype = getattr(multimodal, "mm_encoder_attn_dtype", None)
    scales = getattr(multimodal, "mm_encoder_fp8_scale_path", None)
    return _text([str(dtype), scales]) if dtype else None


def _processor_arguments(given: Mapping[str, object] | None) -> dict[str, object] | None:
    """Without the device: vLLM chooses one for engines that only encode, and no other engine may
    have it, so engines of the same settings would never agree."""
    return {name: each for name, each in (given or {}).items() if name != "device"} or None


def _media_arguments(given: Mapping[str, Mapping[str, Any]] | None) -> dict[str, Any] | None:
    """Without the video decoder that vLLM chooses along with the processor's device."""
    found = {kind: dict(each or {}) for kind, each in (given or {}).items()}
    video = found.get("video", {})
    if (video.get("backend"), video.get("device")) == ("torchcodec", "cuda"):
        del video["backend"], video["device"]
    return {kind: each for kind, each in found.items() if each} or None


def _random_weights(vllm_config: Any) -> dict[str, str]:
    """Models without real weights are equal only where their seeds are."""
    load = getattr(vllm_config, "load_config", None)
    if str(getattr(load, "load_format", "")) != "dummy":
        return {}
    return {"dummy_seed": str(getattr(vllm_config.model_config, "seed", None))}


def _vllm_version() -> str:
    import vllm

    return str(getattr(vllm, "__version__", "unknown"))
