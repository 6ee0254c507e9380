"""Settings, the engines that are refused, and the names that keep engines and models apart."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model.fakes import engine_config

from ecpool.errors import InvalidArgumentError
from ecpool.vllm.config import PoolConfig, check_engine, keys_are_per_request, pool_config
from ecpool.vllm.identity import identify, namespace_of
from ecpool.vllm.widths import row_bytes


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"capacity": "4GiB"}, {"capacity": 4 << 30}),
        ({"capacity": "512MB"}, {"capacity": 512_000_000}),
        ({"capacity": 1 << 20}, {"capacity": 1 << 20}),
        ({"ec_cpu_bytes": "1MiB"}, {"capacity": 1 << 20}),
        ({"ec_cpu_bytes": 1 << 20, "capacity": "1MiB"}, {"capacity": 1 << 20}),
        ({"block_size": "64KiB"}, {"block_size": 65536}),
        ({"block_size": 4096}, {"block_size": 4096}),
        ({"slots": 64}, {"slots": 64}),
        ({"completion": "steps"}, {"completion": "steps"}),
        ({"populate": False}, {"populate": False}),
        ({"populate": "background"}, {"populate": "background"}),
        ({"huge_pages": True}, {"huge_pages": True}),
        ({"deadline_ms": 5}, {"deadline": 0.005}),
        ({"directory": "/dev/shm/here"}, {"directory": "/dev/shm/here"}),
        ({"salt": "blue"}, {"salt": "blue"}),
        ({"log_interval": 0}, {"log_interval": 0.0}),
        ({}, {"pool": None, "persist": False, "checksum": False, "single_flight": 0.0}),
        ({"pool": None, "persist": False}, {"pool": None, "persist": False}),
        ({"pool": "host"}, {"pool": "host", "persist": False, "single_flight": 0.05}),
        ({"pool": "a.B-c_9"}, {"pool": "a.B-c_9", "checksum": False, "on_mismatch": "error"}),
        ({"pool": "host", "persist": True}, {"persist": True, "checksum": True}),
        ({"pool": "host", "persist": True, "checksum": False}, {"checksum": False}),
        ({"pool": "host", "single_flight_ms": 0}, {"single_flight": 0.0}),
        ({"pool": "host", "single_flight_ms": 250}, {"single_flight": 0.25}),
        ({"pool": "host", "on_mismatch": "separate"}, {"on_mismatch": "separate"}),
        ({"pool": "host", "completion": "events"}, {"completion": "events"}),
    ],
)
def test_settings_that_are_allowed(settings: dict[str, Any], expected: dict[str, Any]) -> None:
    if "ec_cpu_bytes" not in settings:
        settings = {"capacity": "1GiB", **settings}
    config = PoolConfig.parse(settings)
    for name, value in expected.items():
        assert getattr(config, name) == value
        assert type(getattr(config, name)) is type(value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, ["capacity", "missing", '{"capacity": "4GiB"}']),
        ({"capacity": None}, ["capacity", "None"]),
        ({"capacity": ""}, ["capacity", "''"]),
        ({"capacity": "4 gigs"}, ["capacity", "4 gigs", "GiB"]),
        ({"capacity": -1}, ["capacity", "-1"]),
        ({"capacity": 0}, ["capacity", "0"]),
        ({"capacity": True}, ["capacity", "True"]),
        ({"capacity": [1]}, ["capacity", "[1]"]),
        ({"capacity": float("nan")}, ["capacity", "nan"]),
        ({"capacity": 4095, "block_size": 4096}, ["capacity", "4095", "4096"]),
        ({"capacity": "1GiB", "ec_cpu_bytes": "2GiB"}, ["capacity", "ec_cpu_bytes", "2GiB"]),
        ({"block_size": 5000}, ["block_size", "5000", "power of two"]),
        ({"block_size": 2048}, ["block_size", "2048", "4KiB"]),
        ({"slots": 0}, ["slots", "0"]),
        ({"slots": 1.5}, ["slots", "1.5"]),
        ({"slots": (1 << 20) + 1}, ["slots", "1048577", "1048576"]),
        ({"completion": "never"}, ["completion", "never", '"events"', '"steps"']),
        ({"populate": 1}, ["populate", "1", "background"]),
        ({"populate": "yes"}, ["populate", "yes", "true"]),
        ({"huge_pages": "on"}, ["huge_pages", "on"]),
        ({"deadline_ms": 0}, ["deadline_ms", "0.1"]),
        ({"deadline_ms": "20"}, ["deadline_ms", "'20'"]),
        ({"deadline_ms": True}, ["deadline_ms", "True"]),
        ({"directory": "shm"}, ["directory", "shm", "absolute"]),
        ({"salt": 7}, ["salt", "7"]),
        ({"log_interval": -1}, ["log_interval", "-1"]),
        ({"log_interval": float("inf")}, ["log_interval", "inf"]),
        ({"pool": "/mnt/disk/pool"}, ["/mnt/disk/pool", "path", "disk"]),
        ({"pool": "~/pool"}, ["~/pool", "path"]),
        ({"pool": "./pool"}, ["./pool", "path"]),
        ({"pool": ".."}, ["..", "path"]),
        ({"pool": ""}, ["pool", "''", "name"]),
        ({"pool": 7}, ["pool", "7", "name"]),
        ({"pool": True}, ["pool", "True", "name"]),
        ({"pool": "two words"}, ["pool", "two words"]),
        ({"pool": "ü"}, ["pool", "ü"]),
        ({"pool": "x" * 81}, ["pool", "80"]),
        ({"pool": "private-x"}, ["pool", "private-"]),
        ({"pool": "host\n"}, ["pool"]),
        ({"pool": "host", "completion": "steps"}, ["completion", "steps", "shared pool"]),
        ({"persist": True}, ["persist", "shared pool", '"pool"']),
        ({"pool": None, "persist": True}, ["persist", "shared pool"]),
        ({"checksum": True}, ["checksum", "shared pool"]),
        ({"pool": "host", "checksum": True}, ["checksum", "persist"]),
        ({"pool": "host", "persist": "yes"}, ["persist", "yes", "true"]),
        ({"pool": "host", "persist": 1}, ["persist", "1"]),
        ({"single_flight_ms": 10}, ["single_flight_ms", "shared pool"]),
        ({"pool": "host", "single_flight_ms": -1}, ["single_flight_ms", "-1"]),
        ({"pool": "host", "single_flight_ms": "10"}, ["single_flight_ms", "'10'"]),
        ({"on_mismatch": "separate"}, ["on_mismatch", "shared pool"]),
        ({"pool": "host", "on_mismatch": "ignore"}, ["on_mismatch", "ignore", '"separate"']),
        ({"capcity": "1GiB"}, ["capcity", "did you mean 'capacity'"]),
        ({"Block_Size": 4096}, ["Block_Size", "did you mean 'block_size'"]),
        ({"zzz": 1}, ["zzz", "known:", "capacity"]),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], words: list[str]) -> None:
    if not {"capacity", "capcity", "zzz"} & set(settings) and settings:
        settings = {"capacity": "1GiB", **settings}
    with pytest.raises(InvalidArgumentError) as caught:
        PoolConfig.parse(settings)
    for word in words:
        assert word in str(caught.value)
    assert isinstance(caught.value, ValueError)


def _engine(**parallel: Any) -> SimpleNamespace:
    config = engine_config()
    for name, value in parallel.items():
        setattr(config.parallel_config, name, value)
    return config


class TestEngines:
    def test_an_ordinary_engine_is_served(self) -> None:
        assert pool_config(engine_config(tensor=8, pipeline=2)).completion == "events"

    def test_encoder_decoder_models_are_refused(self) -> None:
        config = engine_config()
        config.model_config.is_encoder_decoder = True
        with pytest.raises(InvalidArgumentError, match="encoder-decoder"):
            check_engine(config)

    @pytest.mark.parametrize("nodes", [2, 3])
    def test_several_nodes_are_refused(self, nodes: int) -> None:
        with pytest.raises(InvalidArgumentError, match=f"{nodes} nodes.*one host"):
            check_engine(_engine(nnodes_within_dp=nodes))

    def test_several_nodes_of_ray_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        group = object()
        table = {"bundles_to_node_id": {0: "a", 1: "b"}}
        util = SimpleNamespace(placement_group_table=lambda asked: table)
        monkeypatch.setitem(__import__("sys").modules, "ray.util", util)
        with pytest.raises(InvalidArgumentError, match="2 nodes"):
            check_engine(_engine(placement_group=group))

    @pytest.mark.parametrize(("ranks", "served"), [(64, True), (65, False)])
    def test_more_ranks_than_a_transfer_has_bits(self, ranks: int, served: bool) -> None:
        config = engine_config(tensor=ranks)
        if served:
            check_engine(config)
        else:
            with pytest.raises(InvalidArgumentError, match="64 ranks"):
                check_engine(config)

    def test_ranks_with_a_scheduler_each_are_refused(self) -> None:
        config = engine_config(tensor=2)
        config.parallel_config.distributed_executor_backend = "external_launcher"
        with pytest.raises(InvalidArgumentError, match="external_launcher"):
            check_engine(config)

    @pytest.mark.parametrize(
        ("cache_gb", "prefix_caching", "expected"),
        [(0, False, True), (0, True, False), (4, False, False), (4, True, False)],
    )
    def test_keys_by_request(self, cache_gb: float, prefix_caching: bool, expected: bool) -> None:
        config = engine_config()
        config.model_config.multimodal_config.mm_processor_cache_gb = cache_gb
        config.cache_config.enable_prefix_caching = prefix_caching
        assert keys_are_per_request(config) is expected


class TestIdentity:
    def test_engines_of_one_instance_are_told_apart_by_their_index(self) -> None:
        names = {identify(engine_config(index=index)).region for index in range(3)}
        assert len(names) == 3

    def test_equal_instance_ids_are_told_apart(self) -> None:
        one, two = engine_config(), engine_config()
        two.ec_transfer_config.engine_id = "another"
        assert identify(one).region != identify(two).region

    @pytest.mark.parametrize("engine_id", ["a/b", "x" * 500, "ü", "..", None])
    def test_region_names_are_names_of_files(self, engine_id: str | None) -> None:
        config = engine_config()
        config.ec_transfer_config.engine_id = engine_id
        name = identify(config).region
        assert "/" not in name
        assert len(name) <= 80
        assert name.isascii()

    def test_long_names_stay_different(self) -> None:
        names = set()
        for last in "ab":
            config = engine_config()
            config.ec_transfer_config.engine_id = "x" * 200 + last
            names.add(identify(config).region)
        assert len(names) == 2

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("model", "other/model"),
            ("revision", "main"),
            ("dtype", torch.bfloat16),
            ("quantization", "fp8"),
            ("hf_overrides", {"vision_config": {"depth": 2}}),
            ("code_revision", "abc"),
            ("hf_config_path", "other/config"),
        ],
    )
    def test_other_encoders_have_other_namespaces(self, name: str, value: object) -> None:
        config = engine_config()
        before = namespace_of(config)
        setattr(config.model_config, name, value)
        assert namespace_of(config) != before

    @pytest.mark.parametrize(
        "given",
        [
            {"mm_processor_kwargs": {"max_pixels": 50176}},
            {"mm_processor_kwargs": {"images_kwargs": {"device": "cuda"}}},
            {"media_io_kwargs": {"video": {"num_frames": 8}}},
            {"media_io_kwargs": {"video": {"backend": "torchcodec"}}},
            {"video_pruning_rate": 0.5},
            {"mm_encoder_attn_dtype": "fp8"},
        ],
    )
    def test_other_settings_of_the_encoder_make_other_namespaces(
        self, given: dict[str, object]
    ) -> None:
        config = engine_config()
        before = namespace_of(config)
        for name, value in given.items():
            setattr(config.model_config.multimodal_config, name, value)
        assert namespace_of(config) != before

    def test_the_order_of_settings_does_not_matter(self) -> None:
        one, two = engine_config(), engine_config()
        kwargs = {"min_pixels": 1, "max_pixels": 2}
        one.model_config.multimodal_config.mm_processor_kwargs = kwargs
        two.model_config.multimodal_config.mm_processor_kwargs = dict(reversed(kwargs.items()))
        assert namespace_of(one) == namespace_of(two)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("mm_processor_kwargs", {}),
            ("media_io_kwargs", {"video": {}}),
            ("video_pruning_rate", 0.0),
            ("video_pruning_method", "evs"),
            ("mm_encoder_attn_dtype", None),
            ("mm_encoder_fp8_scale_path", "/scales"),
        ],
    )
    def test_settings_that_say_nothing_are_as_none(self, name: str, value: object) -> None:
        config = engine_config()
        before = namespace_of(config)
        setattr(config.model_config.multimodal_config, name, value)
        assert namespace_of(config) == before

    def test_pruning_methods_are_told_apart(self) -> None:
        config = engine_config()
        settings = config.model_config.multimodal_config
        settings.video_pruning_rate = 0.5
        found = set()
        for settings.video_pruning_method in ("evs", "other"):
            found.add(namespace_of(config))
        assert len(found) == 2

    def test_scales_of_the_encoders_attention_are_told_apart(self) -> None:
        config = engine_config()
        settings = config.model_config.multimodal_config
        settings.mm_encoder_attn_dtype = "fp8"
        found = {namespace_of(config)}
        for settings.mm_encoder_fp8_scale_path in ("/some/scales", "/other/scales"):
            found.add(namespace_of(config))
        assert len(found) == 3

    def test_text_models_and_the_models_own_configuration(self) -> None:
        config = engine_config()
        before = namespace_of(config)
        config.model_config.hf_config_path = config.model_config.model
        config.model_config.multimodal_config = None
        assert namespace_of(config) == before

    @pytest.mark.parametrize("kwargs", [None, {"max_pixels": 50176}])
    @pytest.mark.parametrize("media", [{}, {"video": {"num_frames": 8}}])
    def test_a_producer_for_which_vllm_chooses_devices_agrees_with_its_consumers(
        self, monkeypatch: pytest.MonkeyPatch, kwargs: dict[str, int] | None, media: dict[str, Any]
    ) -> None:
        vllm_config = pytest.importorskip("vllm.config").VllmConfig
        if not hasattr(vllm_config, "_resolve_mm_video_decode_device"):
            pytest.skip("this vLLM chooses no devices")
        from vllm import platforms
        from vllm.utils import import_utils

        monkeypatch.setattr(platforms, "_current_platform", SimpleNamespace(device_type="cuda"))
        monkeypatch.setattr(import_utils, "check_torchcodec_available", lambda: None)
        given, names = [], []
        for role in ("ec_producer", "ec_consumer", "ec_both"):
            config = engine_config(role)
            config.ec_transfer_config.is_encode_only = role == "ec_producer"
            settings = config.model_config.multimodal_config
            settings.mm_processor_kwargs = kwargs
            settings.media_io_kwargs = copy.deepcopy(media)
            settings.mm_tensor_ipc = "torch_shm"
            settings.get_mm_processor_device_type = lambda settings=settings: (
                settings.mm_processor_kwargs or {}
            ).get("device")
            vllm_config._resolve_mm_processor_device(config)
            vllm_config._resolve_mm_video_decode_device(config)
            given.append((settings.mm_processor_kwargs, settings.media_io_kwargs))
            names.append(namespace_of(config))
        # vLLM did change them, or this shows nothing.
        assert given[0][0] == {**(kwargs or {}), "device": "cuda"}
        assert given[0][1]["video"]["backend"] == "torchcodec"
        assert given[1:] == [(kwargs, media)] * 2
        assert len(set(names)) == 1

    def test_people_can_read_a_namespace(self) -> None:
        config = engine_config()
        title = namespace_of(config).split("\n")[0]
        assert title.startswith("some/model float32 vllm ")
        config.model_config.model = "/a/very/long/path/" * 9 + "the-model-ü"
        title = namespace_of(config, salt="secret").split("\n")[0]
        assert "the-model-?" in title
        assert len(title.encode()) <= 96
        assert "secret" not in title

    def test_salts_are_apart_but_of_one_kind(self) -> None:
        plain, salted = identify(engine_config()), identify(engine_config(), salt="s")
        assert plain.namespace != salted.namespace
        assert plain.title != salted.title
        assert plain.kind == salted.kind

    def test_engines_of_one_pool_share_a_region_and_are_told_apart(self) -> None:
        one, two = (identify(engine_config(index=index), pool="host") for index in range(2))
        assert one.region == two.region == "host"
        assert one.group != two.group
        assert one.namespace == two.namespace

    def test_adapters_salt_and_dummy_weights_make_other_namespaces(self) -> None:
        plain = engine_config()
        adapted = engine_config(lora_config=SimpleNamespace(default_mm_loras={"image": "/a"}))
        dummy = engine_config(load_config=SimpleNamespace(load_format="dummy"))
        texts = {
            namespace_of(plain),
            namespace_of(plain, salt="s"),
            namespace_of(adapted),
            namespace_of(dummy),
        }
        assert len(texts) == 4

    def test_namespaces_are_the_same_in_every_process(self) -> None:
        def overrides(config: object) -> object:
            return config

        config = engine_config(tensor=2, index=1)
        config.model_config.hf_overrides = overrides
        assert "0x" not in namespace_of(config)
        assert namespace_of(config) == namespace_of(config)


class TestWidths:
    def test_the_width_of_the_model_unless_measured(self) -> None:
        config = engine_config(dtype=torch.bfloat16, width=100)
        assert row_bytes(config, "image") == 200
        config.ec_transfer_config.mm_encoder_output_widths = {"image": 300}
        assert row_bytes(config, "image") == 600
        assert row_bytes(config, "audio") == 200

    def test_encoders_with_features_of_several_layers(self) -> None:
        config = engine_config(dtype=torch.bfloat16, width=100)
        config.model_config.hf_config.vision_config = SimpleNamespace(
            out_hidden_size=100, deepstack_visual_indexes=[8, 16, 24]
        )
        assert row_bytes(config, "image") == 800
        assert row_bytes(config, "audio") == 200

    def test_configurations_that_have_no_such_part(self) -> None:
        config = engine_config(width=10)
        del config.ec_transfer_config.mm_encoder_output_widths
        del config.model_config.hf_config
        assert row_bytes(config, "image") == 40
