"""What a rank writes down: events, steps, memory, clocks, profile, provenance."""
