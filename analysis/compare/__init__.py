"""`compare`: find what became worse from one sweep to another."""
