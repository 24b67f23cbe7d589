"""The shapes and paths on disk that all three packages share; no torch."""
