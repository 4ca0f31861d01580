"""torch.compile, one decoder layer at a time; and how long compilers take."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from engine.attention import ProbedLayer
from engine.gguf_cache import cache_root

log = logging.getLogger(__name__)


def compile_layers(model: nn.Module, layers: list[ProbedLayer]) -> bool:
    """Mark each decoder layer for compilation; the code is made in the first passes. False: no C++ compiler
    was found.

    All layers share one graph (8 s to compile against 113 s for the whole model at once, same speed),
    because nothing in it depends on the layer's number. What inductor makes is kept for the next start, in our cache
    folder unless `TORCHINDUCTOR_CACHE_DIR` names another: torch's own default is a temporary one.
    """
    if find_cxx() is None:
        log.warning("no C++ compiler found: running without compilation")
        return False
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # with all of inductor

    # torch writes its default there by itself once parts of it are imported.
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") in (None, default_cache_dir()):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache_root() / "inductor")
    for layer in decoder_layers(model, layers):
        layer.compile(dynamic=True)
    return True


def find_cxx() -> str | None:
    """The C++ compiler inductor would use."""
    return (
        shutil.which(os.environ["CXX"])
        if "CXX" in os.environ
        else shutil.which("g++") or shutil.which("clang++")
    )


def decoder_layers(model: nn.Module, layers: list[ProbedLayer]) -> list[nn.Module]:
    """The blocks around the attention modules: the members of the ModuleList that holds exactly one each."""
    attentions = {id(layer.module) for layer in layers}
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == len(attentions):
            inside = [{id(part) for part in block.modules()} & attentions for block in module]
            if all(len(found) == 1 for found in inside):
                return list(module)
    return []


class CompileClock:
    """Adds up the time in which code is made. What is found in a compiler's cache on disk is not made."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0
        self._depth = 0

    def on_start(self, _: Any = None) -> None:
        """A compiler begins, maybe inside another."""
        self._depth += 1
        if self._depth == 1:
            self._began = time.monotonic()

    def on_end(self, _: Any = None) -> None:
        """It is done."""
        self._depth -= 1
        if self._depth == 0:
            self.seconds += time.monotonic() - self._began


@contextmanager
def compile_clock() -> Iterator[CompileClock]:
    """Time Numba and torch.compile, as far as either is in use."""
    clock = CompileClock()
    with ExitStack() as stack:
        if "numba" in sys.modules:
            from numba.core import event

            class Listener(event.Listener):  # type: ignore[misc]
                on_start = staticmethod(clock.on_start)
                on_end = staticmethod(clock.on_end)

            stack.enter_context(event.install_listener("numba:compile", Listener()))
        if "torch._dynamo" in sys.modules:
            from torch._dynamo.callback import callback_handler

            callback_handler.register_start_callback(clock.on_start)
            stack.callback(callback_handler.remove_start_callback, clock.on_start)
            callback_handler.register_end_callback(clock.on_end)
            stack.callback(callback_handler.remove_end_callback, clock.on_end)
        yield clock
