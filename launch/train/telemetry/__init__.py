"""A rank's records: events, steps, memory, clocks, profile, provenance."""
