"""The run that `fusion_moe.record` returns: what layers and kernels did while a program ran.

recording.py     is told of launches while a program runs, and makes a Run of what it was told
counts.py        rows of groups, counted by launches (count.cu)
profiled.py      what torch's profiler saw, joined with programs; tiles.py: what kernels marked
data.py          what a run has, and how it is written and read; result.py: what users see of it
summary.py, trace_events.py, page.py
                 its forms: text, a trace for viewers, a page (page.html is its template)
"""

from .recording import record
from .result import Comparison, Run

__all__ = ["Comparison", "Run", "record"]
