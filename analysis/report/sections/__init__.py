"""The report as markdown: a section of it a module, put together in document.py."""
