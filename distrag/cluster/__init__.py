"""a run -> a job on this machine, Slurm or Kubernetes."""
