"""Tells whether two processes have loaded the same files.

A rank that is started again hours later reads the model's files again. Were they replaced meanwhile, the
ranks would compute shares of two models together, and the answers would be wrong without anybody noticing.
"""

import hashlib

from engine.errors import ModelError
from engine.model.check import ModelFiles


def find_fingerprint(files: ModelFiles) -> str:
    """Return what changes when a file of the model is written or replaced: paths, sizes and times.

    Raises `ModelError` if one cannot be looked at.
    """
    digest = hashlib.sha256(repr(files.config).encode())
    for path in sorted({tensor.path for tensor in files.weights.values()}):
        try:
            status = path.stat()
        except OSError as error:
            raise ModelError(f"{path}: cannot look at the model file ({error.strerror}).") from None
        digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns} {status.st_ino}\n".encode())
    return digest.hexdigest()
