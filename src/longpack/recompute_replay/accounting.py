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
    """The running count of one channel. Records are freed on any thread, so it locks.

    The lock is reentrant: a garbage collection inside it may free another record.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._total = _Count()
        self._sites: dict[str, _Count] = {}

    def replace(self, old: Iterable[tuple[str, int]], new: Iterable[tuple[str, int]]) -> None:
        """Count `new` (site, bytes) instead of `old`."""
        with self._lock:
            for site, nbytes in old:
                self._sites[site].add(-nbytes)
                self._total.add(-nbytes)
            for site, nbytes in new:
                if site not in self._sites:
                    self._sites[site] = _Count()
                self._sites[site].add(nbytes)
                self._total.add(nbytes)

    def usage(self) -> Usage:
        with self._lock:
            sites = {site: Usage(count.live, count.peak) for site, count in self._sites.items()}
            return Usage(self._total.live, self._total.peak, sites)


class Held:
    """The bytes of one log by site, counted in `ledger` for as long as this object lives."""

    __slots__ = ("_bytes", "_ledger")

    def __init__(self, ledger: Ledger, bytes_by_site: Mapping[str, int]) -> None:
        self._ledger, self._bytes = ledger, bytes_by_site
        ledger.replace((), bytes_by_site.items())

    def __del__(self) -> None:
        self._ledger.replace(self._bytes.items(), ())


class _Count:
    __slots__ = ("live", "peak")

    def __init__(self) -> None:
        self.live = self.peak = 0

    def add(self, nbytes: int) -> None:
        self.live += nbytes
        if self.live > self.peak:
            self.peak = self.live
