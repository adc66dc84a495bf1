"""The page of `earl report`: a run as one HTML file, which needs no network and no server."""

from tasks.reports.run_page.page import write_page

__all__ = ["write_page"]
