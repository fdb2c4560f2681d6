"""Reports: runs, comparisons and grids as one web page that needs only a browser."""

from fedagg.report.page import write

__all__ = ["write"]
