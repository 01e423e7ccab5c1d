"""Logs of `.pt` files, as other tools write them: `PtDeltaLog` reads them, and `export_pt` writes one."""

from .export import export_pt
from .files import is_pt_delta_log
from .log import PtDeltaLog

__all__ = ["PtDeltaLog", "export_pt", "is_pt_delta_log"]
