"""Every error that cupaged raises on purpose.

One root, `CupagedError`, so that an embedding program can catch all of ours and nothing else. Messages are one line:
what was wrong, where (file, option, request), and what is allowed. The command line prints `str(error)` and exits with
`exit_code`.
"""


class CupagedError(Exception):
    """Root of all deliberate errors."""

    exit_code = 1


class OptionError(CupagedError, ValueError):
    """A value given by the caller (option, parameter, argument) is not usable; names the option and what is allowed."""

    exit_code = 2


class RequestError(CupagedError, ValueError):
    """One request cannot be served (empty prompt, token id out of range, too long); other requests are unaffected."""

    exit_code = 2


class CapacityError(RequestError):
    """A request needs more KV blocks or positions than exist; the message holds both numbers."""


class QueueFullError(RequestError):
    """As many requests are running and waiting as the engine takes; the message holds the limit. Try again later."""


class ModelFileError(CupagedError):
    """A model file or folder is missing, damaged, or not what its header says; names the file and the reason."""


class UnsupportedModelError(ModelFileError):
    """The files are sound, but the architecture or an option in them is not implemented; names it."""


class TokenizerError(CupagedError):
    """No usable tokenizer, or text that it cannot take."""


class TemplateError(CupagedError):
    """A chat template is missing, broken, or refused the messages."""


class DeviceError(CupagedError):
    """The asked device is not usable here; says what is missing and how to mend it."""


class NoDeviceError(DeviceError):
    """A device that was asked for is not there; the line says what is missing and the command that mends it."""

    exit_code = 2


class DeviceMemoryError(DeviceError, MemoryError):
    """The device has not so much memory left; the message holds what was asked for."""


class KernelError(CupagedError, ValueError):
    """Arrays handed to a kernel do not fit it (shape, dtype, strides); names the argument."""


class BlockError(CupagedError):
    """The block pool was misused (double free, foreign block) or its state is inconsistent."""


class OutOfBlocks(BlockError):
    """No free block is left; carries how many were needed and how many were free."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} KV blocks needed, {free} free")
        self.needed = needed
        self.free = free


class StepError(CupagedError):
    """A step failed for one request (non-finite logits, a raising callback); only that request ends."""


class DownloadError(CupagedError):
    """A model package could not be fetched; names it and the reason."""


def shown(value: object) -> str:
    """A caller's value as messages show it: its repr on one line, short, whatever it is."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # an int of more digits than Python prints
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 60 else text[:57] + "..."
