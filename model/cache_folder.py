"""Where fetched models are kept, and what makes that folder safe where there is no home to keep them in."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from cupaged.errors import DownloadError

_REMEDY = "set CUPAGED_CACHE_DIR to one that can be written"


def cache_folder() -> Path:
    """$CUPAGED_CACHE_DIR, or cupaged in $XDG_CACHE_HOME, or ~/.cache/cupaged; without a home, as in a container whose
    user is a bare number, `cupaged-UID` in the temporary directory. It need not exist."""
    own = os.environ.get("CUPAGED_CACHE_DIR")
    return Path(own) if own else _of_the_user() or _temporary()


def safe_cache_folder(create: bool) -> Path:
    """`cache_folder()`; the one in the temporary directory only if nobody else can put models there.

    create: make that one, readable for its owner alone, if it is missing. DownloadError if another user was there
    first, or if it cannot be made.
    """
    folder = cache_folder()
    if os.environ.get("CUPAGED_CACHE_DIR") or _of_the_user() or not hasattr(os, "getuid"):
        return folder
    try:
        if create:
            folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise DownloadError(f"the cache folder {folder} is not a folder of this user; {_REMEDY}")
        if status.st_mode & 0o077:  # kernels are kept there, too, and may have come first
            folder.chmod(0o700)
    except FileNotFoundError:
        pass  # nothing is kept there yet
    except OSError as error:
        raise DownloadError(f"cannot use the cache folder {folder} ({error.strerror or error}); {_REMEDY}") from None
    return folder


def _of_the_user() -> Path | None:
    # The XDG specification has relative values ignored. An unknown home leaves "~" as it is, which is no folder's name.
    for base in (os.environ.get("XDG_CACHE_HOME", ""), os.path.join(os.path.expanduser("~"), ".cache")):
        if os.path.isabs(base):
            return Path(base) / "cupaged"
    return None


def _temporary() -> Path:
    name = f"cupaged-{os.getuid()}" if hasattr(os, "getuid") else "cupaged"  # Windows has a directory for each user
    try:
        return Path(tempfile.gettempdir()) / name
    except OSError:
        raise DownloadError(f"there is no cache folder: no home, and no temporary directory; {_REMEDY}") from None
