"""Files with a message authentication code made with the user's key.

A compiled program is stored as a pickle, and reading a pickle can run any code. A file
is therefore checked before its content is used: its owner, its mode, and an HMAC-SHA256
over its name and content. The key lies in the user's state folder
(``$XDG_STATE_HOME/autopar/key``, by default under ``~/.local/state``), never in the
folder of the files. `autopar run` passes the key to its processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import os
import pathlib
import secrets
import stat
import warnings

from autopar.whole_files import write_whole

# Environment variable with the key in hex digits, set by the process that starts a run.
KEY_VARIABLE = "AUTOPAR_KEY"
_KEY_DIGITS = 64
_HEAD, _CODE_BYTES = b"autopar sealed 1\n", 32


class UntrustedFile(Exception):
    """A file is damaged, or another user may have written it; the message says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class SealedFolder:
    """A folder of sealed files; a failure to read or write one is only a warning.

    Attributes:
      path: path of the folder, which is made when the first file is written.
      what: the noun for the content of a file, in the singular, such as ``plan``.
    """

    path: pathlib.Path
    what: str

    def read(self, name: str) -> bytes | None:
        """Returns the content of a file; None if it is missing or not trusted."""
        path = self.path / name
        try:
            _check_folder(self.path)
            return _unseal(name, _trusted_bytes(path), _key())
        except FileNotFoundError:
            return None
        except (OSError, UntrustedFile) as error:
            self.reject(name, getattr(error, "strerror", None) or str(error))
            return None

    def reject(self, name: str, reason: str) -> None:
        """Warns that a file cannot be used."""
        warnings.warn(
            f"the kept {self.what} {self.path / name} cannot be read and is made anew: "
            f"{reason.rstrip('.')}.",
            stacklevel=3,
        )

    def write(self, name: str, content: bytes) -> None:
        """Writes a file atomically: another process sees the whole file or no file."""
        try:
            code = _code(name, content, _key())
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            _check_folder(self.path)
            write_whole(self.path / name, _HEAD + code + content)
        except (OSError, UntrustedFile) as error:
            reason = getattr(error, "strerror", None) or str(error).rstrip(".")
            warnings.warn(
                f"{self.path}: a {self.what} cannot be kept, and is made anew when it "
                f"is needed again: {reason}.",
                stacklevel=2,
            )


def key_to_share() -> str:
    """Returns the key for `KEY_VARIABLE`.

    If no key can be stored, warns and returns a random key for this run only.
    """
    try:
        return _key().hex()
    except (OSError, UntrustedFile) as error:
        warnings.warn(
            f"{error}; the programs of this run are of no use to a later one.",
            stacklevel=2,
        )
        return secrets.token_hex(_KEY_DIGITS // 2)


def key_path() -> pathlib.Path:
    """Returns the path of this user's key.

    Raises:
      UntrustedFile: the user has no home folder.
    """
    folder = os.environ.get("XDG_STATE_HOME")
    try:
        state = folder or pathlib.Path.home() / ".local" / "state"
    except RuntimeError as error:
        raise UntrustedFile("there is no home folder; set XDG_STATE_HOME") from error
    return pathlib.Path(state) / "autopar" / "key"


def _key() -> bytes:
    """Returns the key of `KEY_VARIABLE`, or the user's key; makes one if needed."""
    if (given := os.environ.get(KEY_VARIABLE)) is not None:
        return _key_of(given, f"${KEY_VARIABLE}")
    path = key_path()
    try:
        text = _trusted_bytes(path, secret=True)
    except FileNotFoundError:
        _make_key(path)
        text = _trusted_bytes(path, secret=True)
    return _key_of(text.decode(errors="replace"), str(path))


def _key_of(text: str, name: str) -> bytes:
    with contextlib.suppress(ValueError):
        if len(text) == _KEY_DIGITS:
            return bytes.fromhex(text)
    raise UntrustedFile(f"{name} holds no key of {_KEY_DIGITS} hex digits; remove it")


def _make_key(path: pathlib.Path) -> None:
    """Stores a random key, unless another process has stored one first."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = path.with_name(f"key-{secrets.token_hex(8)}.part")
    write_whole(part, secrets.token_hex(_KEY_DIGITS // 2).encode())
    try:
        os.link(part, path)
    except FileExistsError:
        pass
    except OSError:  # a file system without links
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _trusted_bytes(path: pathlib.Path, *, secret: bool = False) -> bytes:
    """Returns the content of a regular file of this user that no other user can write.

    Args:
      path: path of the file.
      secret: whether other users must not be able to read the file either.

    Raises:
      OSError: the file cannot be read.
      UntrustedFile: the file belongs to another user, or other users may write it (or
        read it, if it is secret).
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    with open(os.open(path, flags), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise UntrustedFile(f"{path} is no plain file; remove it")
        if found.st_uid != os.geteuid():
            raise UntrustedFile(f"{path} belongs to user {found.st_uid}; remove it")
        forbidden = 0o077 if secret else 0o022
        if found.st_mode & forbidden:
            mode = stat.S_IMODE(found.st_mode)
            right = "read or write" if secret else "write"
            raise UntrustedFile(
                f"others may {right} {path} (mode {mode:04o}); remove it"
            )
        return file.read()


def _check_folder(path: pathlib.Path) -> None:
    """Raises `UntrustedFile` if another user may put files into a folder."""
    found = path.stat()
    if found.st_uid not in (os.geteuid(), 0):
        raise UntrustedFile(
            f"{path} belongs to user {found.st_uid}; remove it, or name another folder"
        )
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise UntrustedFile(f"everybody may write to {path}; chmod go-w {path}")


def _code(name: str, content: bytes, key: bytes) -> bytes:
    made = hmac.new(key, digestmod=hashlib.sha256)
    for part in (name.encode(), b"\0", content):
        made.update(part)
    return made.digest()


def _unseal(name: str, data: bytes, key: bytes) -> bytes:
    """Returns the content of a sealed file.

    Raises:
      UntrustedFile: the code does not match the content and the key.
    """
    start = len(_HEAD) + _CODE_BYTES
    code, content = data[len(_HEAD) : start], data[start:]
    same = hmac.compare_digest(code, _code(name, content, key))
    if not (same and data.startswith(_HEAD)):
        raise UntrustedFile("it is damaged, or was not written with this user's key")
    return content
