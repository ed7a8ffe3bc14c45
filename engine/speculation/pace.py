"""When steps that could overlap are read at once, so that tokens can be proposed for the next."""

from __future__ import annotations

# So many times in a row nothing is proposed before steps overlap again, and for so many steps.
_PATIENCE, _REST = 4, 8


class Pace:
    """Tokens are proposed behind tokens that are known, so before a step that may have proposals
    the one before it is read, and the device waits for the host meanwhile.

    That goes on as long as something is proposed. Once it was not ``_PATIENCE`` times in a row,
    ``_REST`` steps overlap for each one that is looked at.
    """

    def __init__(self) -> None:
        self._num_vain = 0
        self._num_overlapped = 0

    def note(self, *, proposed: bool) -> None:
        """Proposals were looked for, and some made or none."""
        self._num_vain = 0 if proposed else self._num_vain + 1

    def waits(self) -> bool:
        """Whether to read the step that was launched before the next one; to be called once for
        each that could overlap."""
        if self._num_vain < _PATIENCE:
            return True
        self._num_overlapped += 1
        if self._num_overlapped <= _REST:
            return False
        self._num_overlapped = 0
        return True
