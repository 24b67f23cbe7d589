"""From what an attempt left behind to its outcome and its fix."""
