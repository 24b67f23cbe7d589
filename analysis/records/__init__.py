"""Records of a sweep, loaded into dataclasses."""
