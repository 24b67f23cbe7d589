"""Read the loss that a program lets a tqdm bar show.

A bar draws what it was given again at any time, also in later steps, and rounds numbers to three digits. So what the program gives
to a bar counts, and what this bar draws does not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from launch.observe.printed_streams import PrintedStreams

Read = Callable[[str, str], None]
"""Takes the title of a bar, and a text with a loss."""


class ProgressBars:
    """Hooks the methods by which a program gives texts and numbers to a bar, and the one by which a bar draws itself."""

    def __init__(self, read: Read, streams: PrintedStreams) -> None:
        self._read, self._streams = read, streams
        self._told: WeakSet[Any] = WeakSet()
        """The bars to which the program gave a loss."""

    def hook(self, bar: Any) -> None:
        """Hook ``bar``, tqdm's class."""
        self._hook_postfix(bar)
        for method, names_bar in (("set_postfix_str", False), ("set_description", True), ("set_description_str", True)):
            self._hook_text(bar, method, names_bar=names_bar)
        display, pass_on = bar.display, self._streams.pass_on

        @functools.wraps(display)
        def draw(one: Any, *arguments: Any, **named: Any) -> Any:
            if one in self._told:
                return pass_on(lambda: display(one, *arguments, **named))
            return display(one, *arguments, **named)

        bar.display = draw

    def _hook_postfix(self, bar: Any) -> None:
        set_postfix = bar.set_postfix

        @functools.wraps(set_postfix)
        def tell(one: Any, ordered_dict: Any = None, refresh: Any = True, **named: Any) -> None:
            numbers = dict(() if ordered_dict is None else ordered_dict)
            # Formatted without a width, numbers and tensors of one number have all their digits.
            self._say(
                one, getattr(one, "desc", ""), ", ".join(f"{name}={value}" for name, value in (numbers | named).items())
            )
            set_postfix(one, numbers, refresh, **named)

        bar.set_postfix = tell

    def _hook_text(self, bar: Any, method: str, *, names_bar: bool) -> None:
        """Hook a method that sets a text. ``names_bar``: the text is the title itself."""
        set_text = getattr(bar, method)

        @functools.wraps(set_text)
        def tell(one: Any, *arguments: Any, **named: Any) -> None:
            text = arguments[0] if arguments else named.get("desc", named.get("s"))
            self._say(one, "" if names_bar else getattr(one, "desc", ""), str(text))
            set_text(one, *arguments, **named)

        setattr(bar, method, tell)

    def _say(self, one: Any, title: str | None, text: str) -> None:
        """Tell the loss in ``text``, if any. A disabled bar has no title that would tell an evaluation from training."""
        if "loss" in text.lower() and not one.disable:
            self._told.add(one)
            self._read(title or "", text)
