"""What all tests share: hypothesis settings, and which tests this machine can run."""

from __future__ import annotations

import importlib.util
import os

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("default", deadline=None, print_blob=True)
# CI has two busy cores: slow data generation there says nothing about the code.
settings.register_profile(
    "ci", parent=settings.get_profile("default"), suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with a reason, what needs an accelerator or vLLM where there is none."""
    for item in items:
        if item.get_closest_marker("gpu") and not _has_accelerator():
            item.add_marker(pytest.mark.skip(reason="needs an accelerator"))
        if item.get_closest_marker("real") and importlib.util.find_spec("vllm") is None:
            item.add_marker(pytest.mark.skip(reason="needs vLLM"))


def _has_accelerator() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.accelerator.is_available()
