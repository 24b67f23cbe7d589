"""Describe the program: its code, its packages and the settings that it uses."""
