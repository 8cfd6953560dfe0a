"""The logits of a step: on the device, where the next tokens are chosen; on the host once somebody looks at them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cupaged.device.base import Device
from cupaged.kernels.interface import Array, SampleRows


class StepLogits:
    """Logits [R, V] float32 of the wanted rows of a step, in order; valid until the next step."""

    def __init__(self, device: Device, array: Array) -> None:
        self._device = device
        self._array = array
        self._host: Array | None = None

    def __len__(self) -> int:
        return int(self._array.shape[0])

    @property
    def host(self) -> Array:
        """All rows as NumPy, after all compute work; copied once, where the device's memory is not the host's."""
        if self._host is None:
            self._host = self._device.download(self._array)
        return self._host

    def broken_rows(self) -> Array | None:
        """bool [R]: rows with NaN or infinity; None for none, the usual case."""
        return self._device.ops.broken_rows(self._array)

    def sample(self, settings: SampleRows) -> Sequence[int]:
        """A token for each row, from the logits as they are; -1 for a row with NaN or infinity."""
        return self._device.ops.sample(self._array, settings, checked=True)

    def sample_from(self, rows: Sequence[Array], settings: SampleRows) -> Sequence[int]:
        """A token for each of some rows [V] on the host: `host`'s, or adjusted copies."""
        stacked = np.stack(rows)
        return self._device.ops.sample(stacked if self._device.unified else self._device.upload(stacked), settings)
