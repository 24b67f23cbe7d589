"""What runs in the job: the contract (spec, record), the bundle's supervisor, the workers and the engines."""
