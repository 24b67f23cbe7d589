"""One module per verb, with ``EXAMPLE``, ``add_arguments(parser)`` and ``run(arguments)``.

Only the module of the verb that is typed gets imported, so that the list of verbs appears at once.
"""

VERBS = {
    "sweep": "run the cells of a recipe and write the report",
    "plan": "show what sweep would run, and run nothing",
    "advise": "run the eager cells of a recipe for a minute and say whether graphs can help, and which to sweep",
    "status": "show the state of a sweep's runs, or list all sweeps",
    "report": "write the report of a sweep again from its records",
    "compare": "compare a sweep with an earlier one, or with a golden file, and list what is worse",
    "bisect": "run smaller sets of what a failing run captures, and name the smallest one that fails",
    "logs": "print the log of a run: of the rank that failed first, else of rank 0",
    "cancel": "end all runs of a sweep that run or wait, or only the runs you name",
    "resume": "continue a sweep that did not finish",
    "export": "print the cells of a recipe as flags of Megatron-LM or of Megatron Bridge",
}
"""Summary of each verb, in the order of ``--help``."""
