"""The engines. Each trains a RunSpec behind one protocol (protocol.py)."""
