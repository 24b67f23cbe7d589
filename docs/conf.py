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

myst_heading_anchors = 4  # Check links to headings as GitHub spells them.
nitpicky = True
smartquotes = False  # Otherwise the two hyphens of an option become a dash.

html_theme = "furo"
html_title = project
html_copy_source = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]


def check_addresses(_: Sphinx, document: nodes.document) -> None:
    """Warn about external links that no browser could open. Builds need no network, so nobody checks whether a server
    answers."""
    for reference in document.findall(nodes.reference):
        address = reference.get("refuri", "")
        parts = urlsplit(address)
        if parts.scheme and (parts.scheme != "https" or "." not in (parts.hostname or "")):
            logging.getLogger(__name__).warning("not an https address: %s", address, location=reference)


def name_pages(app: Sphinx, document: nodes.document, _: str) -> None:
    """Show a page's title where a link shows its file, as readers on GitHub need it."""
    for reference in document.findall(nodes.reference):
        name = reference.astext().removeprefix("docs/").removesuffix(".md")
        if reference.astext().endswith(".md") and name in app.env.titles:
            reference.children = [nodes.inline("", app.env.titles[name].astext())]


def setup(app: Sphinx) -> None:
    app.connect("doctree-resolved", name_pages)
    app.connect("doctree-read", lambda app, document: check_addresses(app, document))
