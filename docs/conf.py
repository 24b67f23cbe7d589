"""Sphinx's configuration of the documentation site: ``make docs`` builds it, and any warning is an error."""

from __future__ import annotations

from urllib.parse import urlsplit

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging

project = "cuda-graph-orchestrator"
extensions = ["myst_parser"]
root_doc = "index"
exclude_patterns = ["results/*/plots"]

myst_heading_anchors = 4  # links to headings are checked as GitHub spells them
nitpicky = True

html_theme = "furo"
html_title = project
html_copy_source = False


def check_addresses(_: Sphinx, document: nodes.document) -> None:
    """Warn of external links that no browser could open. Whether somebody answers is not asked: builds need no network."""
    for reference in document.findall(nodes.reference):
        address = reference.get("refuri", "")
        parts = urlsplit(address)
        if parts.scheme and (parts.scheme != "https" or "." not in (parts.hostname or "")):
            logging.getLogger(__name__).warning("not an https address: %s", address, location=reference)


def setup(app: Sphinx) -> None:
    app.connect("doctree-read", lambda app, document: check_addresses(app, document))
