"""Messages between processes that may die at any moment: each arrives whole or not at all."""

from __future__ import annotations

import pickle
import socket
from typing import Any

_MOST_BYTES = 1 << 16


def pair() -> tuple[Channel, Channel]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Channel(one), Channel(other)


class Channel:
    """One end. The other end's death is an end of messages, never half a message."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def send(self, message: Any) -> bool:
        """Whether the other end can still get it. Waits while it has too much to read."""
        try:
            self._socket.send(pickle.dumps(message))
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def receive(self, timeout: float | None = None) -> Any:
        """The next message; None when the other end is gone. Raises TimeoutError."""
        self._socket.settimeout(timeout)
        try:
            data = self._socket.recv(_MOST_BYTES)
        except ConnectionResetError:
            return None
        return pickle.loads(data) if data else None

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()
