"""The entry point of group ``vllm.general_plugins``: makes the name ``ECPoolConnector`` known to
vLLM.

vLLM calls it in every process of every engine on the machine, whether ecpool is used there or not.
"""

from __future__ import annotations

import logging

NAME = "ECPoolConnector"
MODULE = "ecpool.vllm.connector"

_logger = logging.getLogger("vllm.ecpool.plugin")


def register() -> None:
    """Register the connector, lazily. May be called again; never raises, whatever vLLM it is."""
    try:
        _register()
    except Exception as error:
        _logger.debug("ecpool's connector was not registered with vLLM: %r", error)


def _register() -> None:
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory

    if NAME not in getattr(ECConnectorFactory, "_registry", {}):
        ECConnectorFactory.register_connector(NAME, MODULE, NAME)
