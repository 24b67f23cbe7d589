"""The engines. Each trains a RunSpec, and implements one protocol (protocol.py)."""
