"""Servers as people run them: over HTTP, named by the plugin alone, stopped by SIGTERM."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from support.engines import ServerProcess, ec_transfer, pool_files
from support.requests import Picture, one_each, tokens_of

AGAIN = "once more: "
PICTURES = [Picture(seed) for seed in range(500, 512)]
REQUESTS = [*one_each(PICTURES), *one_each(PICTURES, before=AGAIN)]


@pytest.mark.scenario("a server leaves nothing in /dev/shm")
def test_a_server_is_used_and_stopped(
    server_of: Callable[..., ServerProcess], answers: Callable
) -> None:
    settings = ec_transfer()
    del settings["ec_connector_module_path"]  # vLLM finds the connector through its plugin
    with server_of(ec_transfer=settings) as server:
        with server.counting() as first:
            cold = [server.chat(each) for each in one_each(PICTURES)]
        with server.counting() as second:
            warm = [server.chat(each) for each in one_each(PICTURES, before=AGAIN)]
        status = server.terminate()
    assert settings["engine_id"] in server.log_text(), "the name that its pools had"
    assert pool_files(settings) == []
    assert status in (0, -signal.SIGTERM)
    assert tokens_of(cold) == answers(one_each(PICTURES))
    assert tokens_of(warm) == answers(one_each(PICTURES, before=AGAIN))
    assert (first.items, second.items) == (len(PICTURES), 0)


@pytest.mark.scenario("data parallel 2, pools kept apart")
def test_data_parallel_ranks_have_pools_of_their_own(
    server_of: Callable[..., ServerProcess], answers: Callable
) -> None:
    settings = ec_transfer()
    with server_of(ec_transfer=settings, data_parallel=2) as server:
        processes = []
        for rank in (0, 1):
            since = len(server.encoder_runs())
            with server.counting() as first:
                cold = [server.chat(each, data_parallel_rank=rank) for each in one_each(PICTURES)]
            with server.counting() as second:
                warm = [
                    server.chat(each, data_parallel_rank=rank)
                    for each in one_each(PICTURES, before=AGAIN)
                ]
            processes.append({run.pid for run in server.encoder_runs()[since:]})
            assert tokens_of(cold) == answers(one_each(PICTURES))
            assert tokens_of(warm) == answers(one_each(PICTURES, before=AGAIN))
            # Each rank encodes for itself: what the other has is not seen here.
            assert (first.items, second.items) == (len(PICTURES), 0)
        server.terminate()
    assert settings["engine_id"] in server.log_text(), "the name that its pools had"
    assert pool_files(settings) == []
    assert len(processes[0]) == len(processes[1]) == 1
    assert processes[0] != processes[1]
