"""One module per verb, with ``EXAMPLE``, ``add_arguments(parser)`` and ``run(arguments)``.

Only the module of the verb on the command line is imported, so that the list of verbs appears at once.
"""

VERBS = {
    "sweep": "run the cells of a recipe and write the report",
    "plan": "show what sweep would run, and run nothing",
    "advise": "measure the eager cells of a recipe for a minute, and advise which graphs to sweep",
    "wrap": "compare your own program with and without CUDA graphs, without a recipe",
    "status": "show the state of a sweep's runs, or list all sweeps",
    "report": "rebuild the report of a sweep from its records",
    "compare": "compare a sweep with an earlier one or with a golden file",
    "bisect": "find the smallest set of captured parts with which a run still fails",
    "logs": "print the steps of a run and one log: of the rank that failed first, else of rank 0 or its launcher",
    "cancel": "cancel the runs of a sweep, or only those you name",
    "resume": "continue a sweep: run what never began, was interrupted or cancelled, or failed because of infrastructure",
    "prune": "delete old sweeps; with --keep reports, keep the files that their reports need",
    "doctor": "check this host, or with --cluster a Slurm cluster and one of its nodes",
    "init": "print a recipe or a cluster profile to start from, or turn a Megatron-LM command line into a recipe",
    "export": "print the cells of a recipe as flags of Megatron-LM or Megatron Bridge",
}
"""Summary of each verb, in the order of ``--help``."""
