"""The command line: one module per verb, and what verbs share."""
