"""How vLLM finds the connector."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
from model.fakes import engine_config
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory

from ecpool.vllm import plugin


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    entries = {
        name: each for name, each in ECConnectorFactory._registry.items() if name != plugin.NAME
    }
    monkeypatch.setattr(ECConnectorFactory, "_registry", entries)
    return entries


def test_the_name_alone_is_enough_once_registered(registry: dict[str, object]) -> None:
    plugin.register()
    config = SimpleNamespace(ec_connector=plugin.NAME, ec_connector_module_path=None)
    assert ECConnectorFactory.get_connector_class(config).__name__ == "ECPoolConnector"


def test_the_module_path_does_without_the_plugin(registry: dict[str, object]) -> None:
    config = SimpleNamespace(ec_connector=plugin.NAME, ec_connector_module_path="ecpool.vllm")
    found = ECConnectorFactory.get_connector_class(config)
    plugin.register()
    assert found is ECConnectorFactory.get_connector_class(config)


def test_registering_again_changes_nothing(registry: dict[str, object]) -> None:
    plugin.register()
    before = dict(registry)
    plugin.register()
    assert registry == before


@pytest.mark.parametrize("missing", ["vllm", "vllm.distributed.ec_transfer.ec_connector.factory"])
def test_survives_a_vllm_without_such_connectors(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    plugin.register()


def test_survives_a_registry_of_another_shape(
    registry: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("registered already")

    monkeypatch.delattr(ECConnectorFactory, "_registry")
    monkeypatch.setattr(ECConnectorFactory, "register_connector", refuse)
    plugin.register()


def test_importing_the_package_is_cheap() -> None:
    """Every vLLM process on the machine imports the plugin, and API servers the package."""
    code = (
        "import sys, ecpool.vllm, ecpool.vllm.plugin\n"
        "heavy = {'torch', 'vllm', 'numpy', 'ecpool._native'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_unknown_names_of_the_package() -> None:
    import ecpool.vllm

    with pytest.raises(AttributeError, match="Nothing"):
        ecpool.vllm.Nothing  # noqa: B018
    assert "ECCPUScheduler" in dir(ecpool.vllm)


def test_wrong_settings_are_errors_at_construction() -> None:
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole

    from ecpool.vllm import ECPoolConnector

    for role in ECConnectorRole:
        with pytest.raises(ValueError, match="capactiy"):
            ECPoolConnector(engine_config(settings={"capactiy": 1}), role)
