"""Makes the secret that the processes of a run on several hosts share.

This module is separate from the modules that use a secret, because it imports
`cryptography`. That takes 0.1 s, and workers do not need it.
"""

from __future__ import annotations

import datetime
import os
import pathlib

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from autopar.errors import PlanError

_YEARS = 10


def create_secret(path: pathlib.Path) -> None:
    """Writes a new secret to a file that only its owner can read.

    Raises:
      PlanError: the file exists, or cannot be written.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise PlanError(
            f"{path} exists. Use it as it is, or name another file: processes that "
            "have the old secret cannot join a run with a new one."
        ) from error
    except OSError as error:
        raise PlanError(f"{path} cannot be written: {error.strerror}.") from error
    with os.fdopen(descriptor, "w") as file:
        file.write(new_secret())


def new_secret() -> str:
    """A private key (P-256) and its self-signed certificate, as PEM text."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "autopar run")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # The clocks of hosts may differ, so the certificate is valid from two days
        # before now.
        .not_valid_before(now - datetime.timedelta(days=2))
        .not_valid_after(now + datetime.timedelta(days=365 * _YEARS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return (private + certificate.public_bytes(serialization.Encoding.PEM)).decode()
