"""What all episodes of a process share that have equal options."""

from __future__ import annotations

import threading
from typing import Any, ClassVar, Self


class SharedWorld:
    """Base of a class whose objects are made from options, one for equal ones."""

    _made: ClassVar[dict[tuple[type, str], Any]] = {}
    _making: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def of(cls, options: Any) -> Self:
        """Make it, or return what the first has made. Raises what making it does."""
        key = cls, repr(options)
        with SharedWorld._making:
            if key not in SharedWorld._made:
                SharedWorld._made[key] = cls(options)  # type: ignore[call-arg]
            made: Self = SharedWorld._made[key]
            return made
