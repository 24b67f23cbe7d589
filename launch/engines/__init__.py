"""The engines: each trains the same RunSpec behind one protocol (protocol.py)."""
