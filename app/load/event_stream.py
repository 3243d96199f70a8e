"""Server-sent events out of bytes that come in any pieces."""

from __future__ import annotations

END_MARK = b"[DONE]"


class EventParser:
    """Collects bytes; gives the data of each event that is whole.

    Lines may end in LF, CRLF or CR; comments and fields other than `data` carry no tokens.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, part: bytes) -> list[bytes]:
        """The data of the events that `part` completes; several data lines are joined by LF."""
        lines = (self._rest + part).splitlines(keepends=True)
        # A last line without its end waits; so does a CR, whose LF may be yet to come.
        self._rest = b""
        if lines and not lines[-1].endswith(b"\n"):
            self._rest = lines.pop()
        events = []
        for line in lines:
            content = line.rstrip(b"\r\n")
            if not content:
                if self._data:
                    events.append(b"\n".join(self._data))
                self._data = []
            elif content.startswith(b"data:"):
                self._data.append(content[5:].removeprefix(b" "))
        return events
