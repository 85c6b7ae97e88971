"""The operators that a step dispatches, as the host sees them."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile


def operators(step: Callable[[], Any]) -> Counter[str]:
    """Count the operators that no other operator calls, by name."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        step()
    events = [event for event in profiler.events() if "::" in event.name]
    return Counter(event.name for event in events if not _is_inside_another(event))


def _is_inside_another(event: FunctionEvent) -> bool:
    while (event := event.cpu_parent) is not None:
        if "::" in event.name:
            return True
    return False
