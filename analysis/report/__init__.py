"""The report of a sweep: Markdown, HTML, JSON, Parquet and PNG files."""
