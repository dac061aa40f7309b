"""A server with the interface of S3 in a process of its own, and a way to it that can be cut."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from localckpt.waiting import wait_until
from tests.upstream.environment import import_upstream, needs, unused_port, upstream_variables

__all__ = ["Way", "import_client", "needs_s3", "serving"]

needs_s3 = needs("s3fs", "moto", "aiobotocore")
_START_S = 60.0


class Way:
    """The way to a server, over a port of its own: it is cut, silent after some bytes, or refuses.

    ``refused`` are the answers to the next requests that write, the last one first.
    """

    def __init__(self, port: int) -> None:
        self._server, self._is_cut = port, False
        self._ends: set[socket.socket] = set()
        self._silent_after: int | None = None
        self.refused: list[int] = []
        self.silent, self._goes_on = threading.Event(), threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def variables(self) -> dict[str, str]:
        """The environment of whoever uses the server, whose client tries little by itself."""
        url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        names = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_MAX_ATTEMPTS"
        return {"AWS_ENDPOINT_URL": url, **dict.fromkeys(names, "1")}

    def be_silent_after(self, nbytes: int) -> None:
        """Hold back all that is sent to the server after so many bytes, until it is mended."""
        self._goes_on.clear()
        self._silent_after = nbytes

    def cut(self) -> None:
        """Close all connections, and those to come."""
        self._is_cut = True
        for end in tuple(self._ends):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._goes_on.set()

    def mend(self) -> None:
        self._is_cut, self._silent_after = False, None
        self.silent.clear()
        self._goes_on.set()

    def close(self) -> None:
        self.cut()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if self._is_cut:
                    near.close()
                    continue
                far = socket.create_connection(("127.0.0.1", self._server))
                self._ends |= {near, far}
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=ends, daemon=True).start()

    def _pump(self, source: socket.socket, to: socket.socket) -> None:
        with suppress(OSError):
            goes_there, is_refused = to.getpeername()[1] == self._server, False
            while data := source.recv(1 << 16):
                if goes_there and self.refused and data[:4] in (b"PUT ", b"POST"):
                    source.sendall(_answer(self.refused.pop()))
                    is_refused = True
                if goes_there and self._silent_after is not None:
                    self._silent_after -= len(data)
                    if self._silent_after < 0:
                        self.silent.set()
                        self._goes_on.wait(_START_S)
                if not is_refused:
                    to.sendall(data)
        for end in (source, to):
            self._ends.discard(end)
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def _answer(status: int) -> bytes:
    code = "SlowDown" if status == 503 else "InternalError"
    body = f"<Error><Code>{code}</Code><Message>ordered</Message></Error>"
    head = f"HTTP/1.1 {status} {code}\r\nConnection: close\r\nContent-Length: {len(body)}"
    return f"{head}\r\nContent-Type: application/xml\r\n\r\n{body}".encode()


def import_client() -> None:
    """Make the server's file system known, and its bucket, in a process that a test has started."""
    import_upstream("s3fs")
    import_upstream("fsspec").filesystem("s3").makedirs("bucket", exist_ok=True)


@contextmanager
def serving() -> Iterator[Way]:
    """Context in which a server runs."""
    port = unused_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, env=upstream_variables(), stderr=subprocess.DEVNULL) as server:
        way = Way(port)

        def answers() -> bool:
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", port)).close()
                return True
            return False

        try:
            assert wait_until(answers, _START_S)
            yield way
        finally:
            way.close()
            server.kill()
