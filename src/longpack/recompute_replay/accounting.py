"""Count the bytes that records hold, now and at most, by channel and by site."""

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes held by the records of a channel, random states included; `sites` splits them."""

    live_bytes: int = 0
    peak_bytes: int = 0
    sites: Mapping[str, "Usage"] = field(default_factory=dict)


class Ledger:
    """The running count of one channel. Records are freed on any thread, so it locks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = [0, 0]  # live, peak
        self._sites: dict[str, list[int]] = {}

    def add(self, site: str, nbytes: int) -> None:
        with self._lock:
            count = self._sites.get(site)
            if count is None:
                count = self._sites[site] = [0, 0]
            for live_and_peak in (self._total, count):
                live_and_peak[0] += nbytes
                if live_and_peak[0] > live_and_peak[1]:
                    live_and_peak[1] = live_and_peak[0]

    def remove(self, held: Iterable[tuple[str, int]]) -> None:
        with self._lock:
            for site, nbytes in held:
                self._sites[site][0] -= nbytes
                self._total[0] -= nbytes

    def usage(self) -> Usage:
        with self._lock:
            sites = {site: Usage(*count) for site, count in self._sites.items()}
            return Usage(*self._total, sites)
