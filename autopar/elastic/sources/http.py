"""Events over HTTP, from who knows the token.

    curl -H "Authorization: Bearer $TOKEN" -d '{"kind": "gone", "hosts": ["host1"]}' \\
        http://127.0.0.1:8765/events

The answer says what comes of each event: 200 accepted, repeated or late, 409 refused.
It listens on this machine only, unless a host is named.
"""

from __future__ import annotations

import os
import secrets
import ssl

from autopar.elastic.sources.serving import Serving
from autopar.elastic.sources.source import Sink
from autopar.errors import PlanError

# Where a token is read from, and the shortest that is taken; and the files of TLS.
TOKEN_VARIABLE, _SHORTEST = "AUTOPAR_EVENTS_TOKEN", 16
CERTIFICATE_VARIABLE, KEY_VARIABLE = "AUTOPAR_EVENTS_CERT", "AUTOPAR_EVENTS_KEY"


class Http:
    """Listens for events.

    Attributes:
      token: what senders must know.
      url: where to send events to; known once it has started.
    """

    def __init__(
        self,
        port: int = 0,
        host: str = "127.0.0.1",
        token: str | None = None,
        *,
        tls: bool = False,
    ) -> None:
        """Listens to nothing yet.

        Args:
          port: 0: any that is free.
          host: the address to listen on; the default is reached from this machine
            only.
          token: None: that of the environment variable `TOKEN_VARIABLE`, or else a
            random one.
          tls: whether it speaks HTTPS, with the certificate and the key in the PEM
            files that `CERTIFICATE_VARIABLE` and `KEY_VARIABLE` name.

        Raises:
          PlanError: the token is short.
        """
        found = token or os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(24)
        if len(found) < _SHORTEST or not found.isascii():
            raise PlanError(
                f"events: the token of http must have {_SHORTEST} ASCII letters or "
                f"more; set {TOKEN_VARIABLE}, or leave it out for a random one."
            )
        self.token = found
        self.url = ""
        self._address = (host, port)
        self._tls = tls
        self._server: Serving | None = None

    def start(self, sink: Sink) -> None:
        """See `Source`."""
        context = _context() if self._tls else None
        host, port = self._address
        try:
            self._server = Serving((host, port), sink, self.token, context)
        except (OSError, OverflowError, UnicodeError) as error:
            kind = "https" if self._tls else "http"
            raise PlanError(
                f"events: cannot listen on {host}:{port}: {error}. Give {kind}:0 for "
                "any free port."
            ) from error
        host, port = self._server.address
        shown = f"[{host}]" if ":" in host else host
        self.url = f"{'https' if self._tls else 'http'}://{shown}:{port}/events"

    def stop(self) -> None:
        """See `Source`."""
        if self._server is not None:
            self._server.close()
            self._server = None


def _context() -> ssl.SSLContext:
    """The certificate and the key of TLS.

    Raises:
      PlanError: they are not there.
    """
    certificate, key = (os.environ.get(x) for x in (CERTIFICATE_VARIABLE, KEY_VARIABLE))
    made = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        made.load_cert_chain(certificate or "", key)
    except (OSError, ValueError) as error:
        raise PlanError(
            f"events: https needs a certificate: {error}. Set {CERTIFICATE_VARIABLE} "
            f"and {KEY_VARIABLE} to PEM files."
        ) from error
    return made
