"""The command line: parse, dispatch, one function a verb."""
