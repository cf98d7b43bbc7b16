"""What pages an arena is made of: huge ones where the setting and the system allow, and where a lease fills one."""

from __future__ import annotations

import dataclasses

from kvd.errors import OutOfMemory
from kvd.memory import limits
from kvd.memory.arena import PAGE, HugePages


@dataclasses.dataclass(frozen=True, slots=True)
class Growth:
    """An arena to be made: its size, in whole pages, and its huge page or 0."""

    nbytes: int
    huge_page: int

    @property
    def grain(self) -> int:
        """Bytes of a page."""
        return self.huge_page or PAGE


class PageSizes:
    """For a :class:`~kvd.memory.pool.Pool` of ``limit`` bytes in arenas of ``arena_bytes``; ``setting`` as there.

    Raises :class:`OutOfMemory` where huge pages are demanded and the system has none.
    """

    def __init__(self, setting: HugePages, *, limit: int, arena_bytes: int) -> None:
        self._setting = setting
        self._limit = limit
        self._arena_bytes = arena_bytes
        self._huge_page = limits.huge_page_size() if setting != "never" else 0
        if setting == "always" and not self._huge_page:
            raise OutOfMemory(
                "memory.huge_pages is always, and this system has no huge pages; set it to auto",
                need=arena_bytes,
                free=0,
                limit=0,
            )

    def small(self, nbytes: int) -> bool:
        """Whether a lease is too small for a huge page of its own."""
        return self._setting == "auto" and nbytes < self._huge_page

    def growth(self, nbytes: int, *, small: bool = False) -> Growth:
        """An arena of at least so many bytes, and of hardly more; ``small``: of normal pages."""
        page = 0 if small else self._usable(max(nbytes, self._arena_bytes))
        grain = page or PAGE
        return Growth(-(-nbytes // grain) * grain, page)

    def transparent(self, growth: Growth) -> bool:
        """Whether to ask for transparent huge pages."""
        return self._setting == "auto" and not growth.huge_page and limits.transparent_shared()

    def hint(self, kind: str) -> str:
        """What to do for huge pages where an arena of this ``kind`` has none."""
        has = kind == "hugetlb" or self._setting == "never"
        return "" if has else "no free huge pages; vm.nr_hugepages reserves some"

    def _usable(self, nbytes: int) -> int:
        """The huge page for an arena of so many bytes; 0 where too few are free."""
        page = self._huge_page
        if not page or self._setting == "always":
            return page
        size = -(-nbytes // page) * page
        return page if size <= min(self._limit, limits.free_huge_pages(page) * page) else 0
