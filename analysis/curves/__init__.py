"""Loss curves of any framework, from files."""
