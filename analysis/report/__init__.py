"""The report of a sweep: md, html, json, parquet, png."""
