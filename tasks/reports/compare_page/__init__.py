"""Runs side by side: what `earl compare` prints, and its page, one HTML file without a network."""

from tasks.reports.compare_page.compared import Compared, compare, without_common_metric
from tasks.reports.compare_page.page import write_page

__all__ = ["Compared", "compare", "without_common_metric", "write_page"]
